"""In the documentation, generated parts are up to date, and named files and commands exist."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import re
import xml.etree.ElementTree

import pytest

from dask_gpurt import metrics
from dask_gpurt.cli import gpurt

ROOT = pathlib.Path(__file__).parents[1]


def files(pattern: str) -> list[pathlib.Path]:
    """Return the files of the documentation, without those that a build of the site made."""
    found = (ROOT / "docs").rglob(pattern)
    return sorted(path for path in found if "_build" not in path.parts)


PAGES = [*sorted(ROOT.glob("*.md")), *files("*.md")]

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
#: A path in this repository: it starts with one of its folders, or names a file at its top.
FOLDERS = ("dask_gpurt/", "tests/", "docs/", "benchmarks/", "deploy/")
TOP_FILE = re.compile(r"(Makefile|setup\.cfg|pyproject\.toml|ruff\.toml|LICENSE|[A-Z]+\.md)")
#: The only page outside of the documentation's folder.
PAGES.append(ROOT / "benchmarks" / "HISTORY.md")


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def prose(page: pathlib.Path) -> str:
    return FENCED.sub("", page.read_text())


def commands(page: pathlib.Path) -> str:
    """Return all code of a page, blocks and spans, one a line."""
    text = page.read_text()
    return "\n".join([*FENCED.findall(text), *SPAN.findall(FENCED.sub("", text))])


def anchors(page: pathlib.Path) -> set[str]:
    headings = re.findall(r"^#+ +(.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


#: Scripts that write a page or a picture.
GENERATORS = ["make_configuration", "make_patches", "make_results"]


def generator(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", GENERATORS)
def test_generated_page_is_up_to_date(name):
    assert generator(name).main(["--check"]) == 0


@pytest.mark.parametrize("name", GENERATORS)
def test_a_stale_page_is_noticed(name, tmp_path, monkeypatch, capsys):
    module = generator(name)
    monkeypatch.setattr(module, "PAGE", tmp_path / "page.md")
    assert module.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().err
    assert module.main([]) == 0
    assert module.main(["--check"]) == 0


def test_figures_of_other_pages_are_on_the_performance_page():
    lines = (ROOT / "docs" / "performance.md").read_text().splitlines()
    numbers = [set(re.findall(r"\d+(?:\.\d+)?", line)) for line in lines]
    home = (ROOT / "docs" / "index.md").read_text()
    ratios = re.findall(r"\| (\d+\.\d+) (?:times as fast|of the time) \|", home)
    assert ratios
    wanted = [*({row.stock, row.enabled} for row in generator("make_results").ROWS)]
    for figures in [*wanted, *({ratio} for ratio in ratios)]:
        assert any(figures <= found for found in numbers), figures


PATCHES = sorted((ROOT / "dask_gpurt" / "plugins" / "patches").glob("[!_]*.py"))


@pytest.mark.parametrize("path", PATCHES, ids=name_of)
def test_patches_are_taken_back_by_functions_that_exist(path):
    tree = ast.parse(path.read_text())
    kinds = (ast.ClassDef, ast.FunctionDef)
    defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    defined |= {
        f"{owner.name}.{node.name}"
        for owner in tree.body
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, kinds)
    }
    for *_, taken_back_by in generator("make_patches").rows(ast.get_docstring(tree)):
        assert set(SPAN.findall(taken_back_by)) <= defined, taken_back_by


@pytest.mark.parametrize(
    "table",
    [
        "| what | why |\n|---|---|\n| a | b |",
        "| what | why | taken back by |\n|---|---|---|\n| a | b |",
        "| what | why | taken back by |\n|---|---|---|\n| a | b | c | d |",
    ],
    ids=["two columns", "a row that is short", "a row that is long"],
)
def test_a_malformed_table_of_patches_is_refused(table):
    with pytest.raises(ValueError, match=r"a table|a row"):
        list(generator("make_patches").rows(table))


def test_a_row_of_patches_may_wrap():
    table = "| what | why | taken back by |\n|---|---|---|\n| `a` | b\nc\n| `d` |\n| e | f | |\n\ng"
    assert list(generator("make_patches").rows(table)) == [("`a`", "b c", "`d`"), ("e", "f", "")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_have_targets(page):
    for target in LINK.findall(prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name_of(page)} links to {target}"
        if anchor:
            assert anchor in anchors(found), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_exist(page):
    for span in SPAN.findall(prose(page)):
        is_made = span.startswith("docs/_build")  # by `make docs`
        if (span.startswith(FOLDERS) and " " not in span) or TOP_FILE.fullmatch(span):
            assert is_made or list(ROOT.glob(span)), f"{name_of(page)} names {span}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_commands_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = commands(page)
    for target in re.findall(r"\bmake ([a-z][a-z-]*)", code):
        assert target in targets, f"{name_of(page)}: make {target}"
    for command in re.findall(r"\bdask gpurt ([a-z-]+)", code):
        assert command in gpurt.commands, f"{name_of(page)}: dask gpurt {command}"


def logged_templates() -> dict[str, str]:
    """Return the texts that the package logs as warnings or errors, and where."""
    found = {}
    for path in sorted((ROOT / "dask_gpurt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="warning" | "error" | "exception"),
                    args=[ast.Constant(value=str(text)), *_],
                ):
                    found[text] = f"{name_of(path)}:{node.lineno}"
    return found


def test_logged_warnings_and_errors_are_explained():
    lines = commands(ROOT / "docs" / "reference" / "troubleshooting.md")
    templates = logged_templates()
    assert len(templates) > 50
    for text, where in templates.items():
        # The page has capitals where values differ, and may leave out the end of a line.
        part = max(re.split(r"%\w|;", text.split(". ")[0]), key=len).strip(" ,:()'")
        assert part in lines, f"{where} logs {text!r}"


@pytest.mark.parametrize(("name", "meaning"), metrics.MEANING.items())
def test_each_counter_is_on_its_page(name, meaning):
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert f"| `{name}` | {meaning} |" in page


def test_decisions_are_numbered_without_gaps_and_listed():
    pages = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert [page.name[:4] for page in pages] == [f"{n + 1:04d}" for n in range(len(pages))]
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    for page in pages:
        assert f"decisions/{page.name}" in architecture


@pytest.mark.parametrize("picture", files("*.svg"), ids=name_of)
def test_pictures_are_self_contained(picture):
    tree = xml.etree.ElementTree.parse(picture)
    for element in tree.iter():
        for name, value in element.attrib.items():
            if name.endswith("href"):
                assert value.startswith("#"), value
    assert "url(http" not in picture.read_text()
