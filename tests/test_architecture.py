"""Dependencies point one way, workflows touch nothing that is not deterministic, and files stay small."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# What each part may import of the project. Nobody imports the entry points but those that compose.
ALLOWED = {
    "contracts": set(),
    "store": {"contracts"},
    "receivers": {"contracts", "store"},
    "runs": {"contracts"},
    "pipeline": {"contracts", "store", "receivers", "runs"},
    "activities": {"contracts", "store", "receivers", "pipeline"},
    "workflows": {"contracts", "activities"},
    "embedded": set(),
    "config": {"contracts"},
    "intake": {"contracts", "store"},
    "failures": {"contracts", "embedded"},
    "worker": {
        "activities",
        "config",
        "contracts",
        "embedded",
        "failures",
        "pipeline",
        "receivers",
        "runs",
        "store",
        "workflows",
    },
    "http_api": {"config", "contracts", "intake", "pipeline", "receivers", "runs", "store"},
    "api": {
        "config",
        "contracts",
        "embedded",
        "failures",
        "http_api",
        "intake",
        "pipeline",
        "receivers",
        "runs",
        "store",
        "worker",
    },
    "commands": {
        "config",
        "contracts",
        "embedded",
        "failures",
        "http_api",
        "intake",
        "labs",
        "pipeline",
        "receivers",
        "runs",
        "store",
        "worker",
    },
    "labs": {
        "commands",
        "config",
        "contracts",
        "embedded",
        "failures",
        "intake",
        "pipeline",
        "receivers",
        "runs",
        "store",
        "worker",
    },
    "starter": {"commands", "config", "contracts", "failures"},
}
# What a part must never import of the world.
FORBIDDEN = {
    "contracts": {"redis", "sqlalchemy"},
    "store": {"redis", "temporalio"},
    "receivers": {"redis", "temporalio"},
    "workflows": {"logging", "os", "random", "redis", "sqlalchemy", "sys", "time", "uuid"},
}
# Where the two databases may be told apart.
DIALECTS = {"store/dialect.py", "store/engine.py", "store/fairlock.py", "store/schema.py"}


def project_files() -> list[Path]:
    """All Python files of the project beside the tests."""
    found = []
    for part in [*ALLOWED, "bench"]:
        found += [ROOT / f"{part}.py"] if (ROOT / f"{part}.py").exists() else sorted((ROOT / part).rglob("*.py"))
    return found


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> set[str]:
    """Full names of the modules that are imported anywhere below."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            found.add(node.module or "")
    return found


def tops(modules: set[str]) -> set[str]:
    return {module.split(".")[0] for module in modules}


FILES = project_files()
IDS = [str(path.relative_to(ROOT)) for path in FILES]
each_file = pytest.mark.parametrize("path", FILES, ids=IDS)


def test_the_parts_are_found() -> None:
    assert {part_of(path) for path in FILES} >= {"contracts", "store", "pipeline", "workflows", "worker", "starter"}
    known = set(ALLOWED) | {"bench", "tests"}
    parts = {p.parent.name for p in ROOT.glob("*/__init__.py")} | {p.stem for p in ROOT.glob("*.py")}
    assert parts <= known, "a new part needs its rule here"


@each_file
def test_dependencies_point_one_way(path: Path) -> None:
    part = part_of(path)
    used = tops(imports(ast.parse(path.read_text())))
    ours = used & set(ALLOWED)
    if part != "bench":
        assert ours - ALLOWED[part] - {part} == set()
    assert used & FORBIDDEN.get(part, set()) == set()
    assert "tests" not in used


@pytest.mark.parametrize("path", sorted((ROOT / "workflows").glob("*.py")), ids=lambda path: path.name)
def test_workflows_pass_our_own_modules_through_the_sandbox(path: Path) -> None:
    tree = ast.parse(path.read_text())
    passed: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and "imports_passed_through" in ast.unparse(node.items[0]):
            for statement in node.body:
                passed |= imports(statement)
    bare = {module for module in imports(tree) - passed if module.split(".")[0] in ALLOWED}
    assert {module for module in bare if not module.startswith("workflows.")} == set()
    assert tops(passed) <= {"activities", "contracts"}


@pytest.mark.parametrize("path", sorted((ROOT / "workflows").glob("*.py")), ids=lambda path: path.name)
def test_a_worker_that_dies_in_an_activity_is_missed_by_its_beats(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and re.search(r"\.(execute|start)_activity\w*$", ast.unparse(node.func)):
            assert "heartbeat_timeout" in {keyword.arg for keyword in node.keywords}, f"line {node.lineno}"


@each_file
def test_only_the_engine_opens_transactions(path: Path) -> None:
    if path == ROOT / "store" / "engine.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            assert not re.search(r"engine\.(begin|connect|raw_connection)$", called), f"line {node.lineno}: {called}"
            if part_of(path) == "store":
                assert node.func.attr not in ("commit", "rollback"), f"line {node.lineno}: the store never commits"


# Where a terminal is told from a pipe, which gets plain text, and no bar. Others may name the columns of a bar.
DRAWING = {"commands/context.py", "commands/following.py"}


@each_file
def test_one_place_draws_tables_and_bars(path: Path) -> None:
    if str(path.relative_to(ROOT)) in DRAWING or part_of(path) == "bench":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [node.module] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(str(module).partition(".")[0] == "rich" for module in modules):
            assert isinstance(node, ast.ImportFrom)
            drawing = [alias.name for alias in node.names if not alias.name.endswith("Column")]
            assert drawing == [], f"line {node.lineno}"


def names_a_database(node: ast.AST) -> str | None:
    """The dialect that a piece of code names; docstrings and comments may."""
    texts = []
    if isinstance(node, ast.Name):
        texts = [node.id]
    elif isinstance(node, ast.Attribute):
        texts = [node.attr]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
        texts = [node.value]
    elif isinstance(node, ast.Import | ast.ImportFrom):
        texts = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
    for text in texts:
        # Prose for a person says SQLite and PostgreSQL; code says the dialects' names.
        found = re.search(r"\b(is_)?(sqlite3?|postgresql|psycopg)(_\w+)?\b(?!://)", text)
        if found:
            return found.group()
    return None


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if part_of(path) in ("activities", "contracts", "pipeline", "receivers", "store")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_only_the_dialect_knows_the_databases_apart(path: Path) -> None:
    if str(path.relative_to(ROOT)) in DIALECTS:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        assert names_a_database(node) is None, f"line {getattr(node, 'lineno', '?')}: {names_a_database(node)}"


# What is taken back or switched away from: no event, delivery, order, effect, charge or record of what was done.
FORGOTTEN = {
    "faults",
    "generations",
    "receiver_ends",  # one that was not finished and is taken back
    "rebuild_expected",
    "sales_applied",  # of a generation that is dropped
    "sales_totals",
    "subscriptions",  # kept as ended_subscriptions
}


def deleted(source: str) -> set[str]:
    """The tables whose rows a module deletes."""
    found = set(re.findall(r"\bDELETE FROM (\w+)", source, re.IGNORECASE))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "delete":
            found.add(ast.unparse(node.args[0] if node.args else node.func.value))
    return found


def test_nothing_of_the_history_is_ever_deleted() -> None:
    found: set[str] = set()
    for path in project_files():
        if part_of(path) in ("bench", "labs"):
            continue  # on databases of their own
        found |= deleted(path.read_text())
    assert found == FORGOTTEN


def test_files_stay_small_and_have_a_topic() -> None:
    too_long, nameless = [], []
    for folder in [*ALLOWED, "bench", "tests"]:
        top = ROOT / folder
        for path in [top.with_suffix(".py")] if top.with_suffix(".py").exists() else top.rglob("*.py"):
            lines = len(path.read_text().splitlines())
            if lines > (500 if folder == "tests" else 400):
                too_long.append(f"{path.relative_to(ROOT)}: {lines}")
            if path.name in ("utils.py", "common.py", "helpers.py", "misc.py"):
                nameless.append(str(path.relative_to(ROOT)))
    assert too_long == []
    assert nameless == []


def test_each_module_says_what_it_keeps() -> None:
    silent = [str(path.relative_to(ROOT)) for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_the_rules_catch_what_they_are_for() -> None:
    assert tops(imports(ast.parse("def f():\n    from store.jobs import x\n    import redis"))) == {"store", "redis"}
    assert names_a_database(ast.parse("database.is_sqlite").body[0].value) == "is_sqlite"  # type: ignore[attr-defined]
    assert names_a_database(ast.parse("'postgresql'").body[0].value) == "postgresql"  # type: ignore[attr-defined]
    assert names_a_database(ast.parse("'Redis of PostgreSQL'").body[0].value) is None  # type: ignore[attr-defined]
