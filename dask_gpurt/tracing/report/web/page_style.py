"""The style of the report's page: light and dark, from wide screens to telephones."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --ink: #1d2125; --faint: #5f6973;
  --rule: #e1e4e6; --card: #ffffff; --accent: #b4470f; --heat: #0f8a6d;
  --computing: #0f8a6d; --network: #d9731a; --receivers: #e0a92e; --memory: #8457b8;
  --disk: #a3563c; --thread: #4a7fb5; --held: #7f8c3a; --loop: #b0609c;
  --scheduler: #c23b5a; --client: #9aa4ad; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --ink: #e8eaec;
  --faint: #9aa5ae; --rule: #2c3237; --card: #1b1f23; --accent: #ff9a5c; --heat: #35b893;
  --computing: #35b893; --network: #ef9246; --receivers: #ecc45f; --memory: #ab86da;
  --disk: #c9826a; --thread: #76a7d8; --held: #b3c26a; --loop: #d58cc3;
  --scheduler: #e66f8a; --client: #6b757e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  overflow-wrap: anywhere; }
main { max-width: 68rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .3rem; letter-spacing: -.01em; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .3rem; }
h3 { font-size: .95rem; margin: 1.25rem 0 .2rem; font-weight: 600; }
p { margin: 0 0 .75rem; max-width: 46rem; }
.faint { color: var(--faint); font-size: .9rem; }
.headline { font-size: 1.15rem; margin: 1.25rem 0 1rem; max-width: 54rem; }
.below { margin-top: 1rem; }
.box { background: var(--card); border: 1px solid var(--rule); border-radius: .6rem;
  padding: .8rem 1rem; }
ol.verdict { list-style: none; margin: 0; padding: 0; display: grid; gap: .75rem; }
ol.verdict li { border-left: .3rem solid var(--accent); }
ol.verdict b { font-size: 1.05rem; }
ol.verdict .saves { float: right; margin-left: 1rem; color: var(--accent); font-weight: 600; }
ol.verdict p { margin: .3rem 0 0; }
code { display: inline-block; margin-top: .5rem; padding: .15rem .5rem; border-radius: .3rem;
  background: var(--page); border: 1px solid var(--rule);
  font: .85rem ui-monospace, Menlo, Consolas, monospace; }
code.name { margin: 0; padding: 0 .2rem; }
svg { display: block; width: 100%; shape-rendering: crispEdges; }
.strip { height: 2.25rem; border-radius: .3rem; overflow: hidden; }
.use { height: 1.6rem; border-bottom: 1px solid var(--rule); background: var(--page); }
.area { height: 5rem; background: var(--page); }
.area path { fill: var(--network); fill-opacity: .35; stroke: var(--network);
  stroke-width: 1.5; vector-effect: non-scaling-stroke; }
.area line { stroke: var(--faint); stroke-dasharray: 4 3; vector-effect: non-scaling-stroke; }
rect.computing { fill: var(--computing); } i.computing { background: var(--computing); }
rect.network { fill: var(--network); } i.network { background: var(--network); }
rect.receivers { fill: var(--receivers); } i.receivers { background: var(--receivers); }
rect.memory { fill: var(--memory); } i.memory { background: var(--memory); }
rect.disk { fill: var(--disk); } i.disk { background: var(--disk); }
rect.thread { fill: var(--thread); } i.thread { background: var(--thread); }
rect.held { fill: var(--held); } i.held { background: var(--held); }
rect.loop { fill: var(--loop); } i.loop { background: var(--loop); }
rect.scheduler { fill: var(--scheduler); } i.scheduler { background: var(--scheduler); }
rect.client { fill: var(--client); } i.client { background: var(--client); }
.axis { display: flex; justify-content: space-between; color: var(--faint); font-size: .8rem;
  font-variant-numeric: tabular-nums; margin-top: .15rem; }
.rows { display: grid; grid-template-columns: minmax(6rem, 14rem) 1fr; gap: .2rem .75rem;
  align-items: center; font-size: .85rem; }
.rows > .axis { grid-column: 2; }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem;
  margin-right: .5rem; vertical-align: -.05rem; }
table { border-collapse: collapse; width: 100%; font-size: .88rem;
  font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--faint); font-size: .8rem;
  vertical-align: bottom; }
th, td { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
tbody tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; white-space: nowrap; }
td.name { min-width: 8rem; }
td .bar { display: block; height: .25rem; border-radius: .15rem; background: var(--heat);
  margin: .15rem 0 0 auto; }
.more { color: var(--faint); font-size: .85rem; margin: .5rem 0 0; }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: .2rem 1.25rem;
  margin: 0; font-size: .9rem; }
dt { color: var(--faint); } dd { margin: 0; }
@media (max-width: 46rem) {
  main { padding: 1.25rem .8rem 3rem; }
  .headline { font-size: 1.05rem; }
  ol.verdict .saves { float: none; display: block; margin: 0; }
  .rows { grid-template-columns: 1fr; gap: .1rem; } .rows > .axis { grid-column: 1; }
  .rows > span { margin-top: .35rem; }
  thead { display: none; }
  tr { display: grid; grid-template-columns: 1fr 1fr; gap: 0 1.25rem; padding: .5rem 0;
    border-bottom: 1px solid var(--rule); }
  tbody tr:last-child { border-bottom: 0; }
  td, td.n { display: flex; justify-content: space-between; gap: .5rem; border: 0;
    padding: .05rem 0; text-align: right; white-space: normal; }
  td::before { content: attr(data-label); color: var(--faint); text-align: left;
    flex: none; max-width: 50%; }
  td.name { font-weight: 600; text-align: left; display: block; grid-column: 1 / -1; }
  td.name::before { content: none; }
  td .bar { display: none; }
}
"""
