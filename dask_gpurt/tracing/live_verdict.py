"""The verdict: which bottlenecks matter, in which order, and why nothing stands out if none does.

`live_rules` finds them; this module knows nothing of causes. Pure functions over numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dask_gpurt.tracing.amounts import count_text
from dask_gpurt.tracing.bottleneck import Bottleneck
from dask_gpurt.tracing.live_facts import LiveFacts
from dask_gpurt.tracing.live_rules import RULES

#: Savings below this, in seconds or as a share of the period, are no bottleneck.
LEAST_S = 0.5
LEAST_SHARE = 0.05
#: Most bottlenecks in a verdict.
MOST_SHOWN = 3


def bottlenecks(facts: LiveFacts) -> list[Bottleneck]:
    """Return what limits the program: the most seconds to save first, unknown savings last."""
    # Shuffles that overlap have more seconds than the period.
    most_s = facts.period_s
    least_s = max(LEAST_S, LEAST_SHARE * most_s)
    kept = []
    for rule in RULES.values():
        if (one := rule(facts)) is not None:
            saves_s = None if one.saves_s is None else min(one.saves_s, most_s)
            if saves_s is None or saves_s >= least_s:
                kept.append(replace(one, saves_s=saves_s))
    if {one.rule for one in kept} & {"slow-link", "skew", "spill"}:
        # These are why peers are slow.
        kept = [one for one in kept if one.rule != "back-pressure"]
    if "small-messages" in {one.rule for one in kept}:
        # They are why the scheduler is busy.
        kept = [one for one in kept if one.rule != "scheduler-bound"]
    return sorted(kept, key=lambda one: -1.0 if one.saves_s is None else one.saves_s, reverse=True)


def nothing_stands_out(facts: LiveFacts) -> str:
    """Return why no rule applies, in numbers."""
    if not facts.spent["task_s"] and not facts.shuffles:
        return "nothing stands out: no task has run"
    parts = []
    if facts.period_s > 0:
        share = min(1.0, facts.working_s / facts.threads / facts.period_s)
        threads = count_text(facts.threads, "thread")
        parts.append(f"{threads} worked {share:.0%} of {facts.period_s:.1f} s")
        if facts.wall_s is not None and share < 0.5:
            parts[-1] += " (the program itself, the scheduler or starting processes took the rest)"
    waited_s = facts.spent["task_s"] - facts.working_s
    parts.append(f"tasks waited {waited_s:.1f} s for peers, memory and disk")
    sending = [one["longest_sender"][2] for one in facts.shuffles if one["longest_sender"]]
    parts.append(
        f"workers were sending to other hosts for at most {sum(sending):.1f} s"
        if sending
        else "no shuffled bytes left their host"
    )
    if facts.shuffles:
        parts.append(f"skew is at most {max(one['skew'] for one in facts.shuffles):.2f}")
    return "nothing stands out: " + ", ".join(parts)


def verdict_lines(found: Iterable[Bottleneck], facts: LiveFacts) -> list[str]:
    """Return the verdict as paragraphs: the most useful bottlenecks, or that nothing stands out."""
    lines = []
    for one in [*found][:MOST_SHOWN]:
        saves = "" if one.saves_s is None else f" (up to {one.saves_s:.1f} s)"
        setting = f" Set `{one.setting}`." if one.setting else ""
        lines.append(f"{one.rule}{saves}: {one.evidence}. {one.advice}{setting}")
    return lines or [nothing_stands_out(facts)]
