"""The plan of the house: a room imports only rooms below it, and nothing imports in a circle."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "fedcodist"
# From the lowest floor up.
ROOMS = (
    *("core", "compression", "privacy", "data", "distillation", "models", "text", "datasets"),
    *("run", "algorithms", "config", "configs", "report", "tuning", "commands"),
)
# An algorithm knows nothing of the loop that runs it.
APART = {("algorithms", "run")}


def imported(path):
    """Modules of the package that a file imports, at whatever place."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_a_room_imports_only_rooms_below_it():
    wrong = []
    for path in sorted(ROOT.glob("*/**/*.py")):
        room = path.relative_to(ROOT).parts[0]
        for name in imported(path):
            parts = name.split(".")
            if parts[0] in ("experiments", "tests", "benchmarks"):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
            if parts[0] != "fedcodist" or len(parts) < 2 or parts[1] not in ROOMS:
                continue
            if ROOMS.index(parts[1]) > ROOMS.index(room) or (room, parts[1]) in APART:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_every_module_has_a_room():
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "cli.py"}
    assert {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} == set(ROOMS)


def test_no_module_imports_itself_in_a_circle():
    modules = {
        ".".join(("fedcodist", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in ROOT.rglob("*.py")
    }
    edges = {}
    for module, path in modules.items():
        found = {name if name in modules else name.rpartition(".")[0] for name in imported(path)}
        edges[module] = (found & set(modules)) - {module}
    while leaves := [module for module, below in edges.items() if not below]:
        for leaf in leaves:
            del edges[leaf]
        edges = {module: below - set(leaves) for module, below in edges.items()}
    assert not edges, edges


def test_configs_that_ship_are_made_of_settings_alone():
    # `your_own` holds networks, data and metrics too: it is made to be copied.
    for path in (ROOT / "configs").glob("[!y]*.py"):
        names = set(imported(path))
        assert all(
            name.startswith(("fedcodist.config.", "fedcodist.configs.", "ml_collections."))
            for name in names
        ), (path.name, names)


def test_the_list_of_slow_variants_is_of_tests_that_there_are():
    """A line of a test with another name by now marks nothing: the test would run in CI again."""
    tests = Path(__file__).parent
    lines = (tests / "slow_variants.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    wrong = [f"{line!r} is there twice" for line in dict.fromkeys(lines) if lines.count(line) > 1]
    sources = {}
    for line in lines:
        path, _, name = line.partition("::")
        if path not in sources:
            file = tests.parent / path
            sources[path] = file.read_text(encoding="utf-8") if file.is_file() else None
        # A line may be a whole file. The values of a function's variants are known to pytest alone.
        function = f"\ndef {name.partition('[')[0]}(" if name else ""
        if sources[path] is None or function not in sources[path]:
            wrong.append(f"{line!r} is no test")
    assert not wrong, "\n".join(wrong)
