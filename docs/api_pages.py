"""A hook of mkdocs: a page of the API for every room, from the table of public names."""

import importlib.util
from pathlib import Path

from mkdocs.structure.files import File

PACKAGE = Path(__file__).parents[1] / "fedcodist" / "__init__.py"
ROOMS = {
    "core": "What a method is made of",
    "compression": "Compressed links",
    "data": "Federated data and partitions",
    "datasets": "Public data sets",
    "distillation": "Distillation",
    "models": "Networks and layers",
    "text": "Networks and tasks of text",
    "run": "Experiments and runs",
    "algorithms.clients": "Methods that train one model",
    "algorithms.pools": "Servers of pools",
    "algorithms.parties": "Parties with networks of their own",
    "algorithms.graph": "Clients on a graph",
    "config": "Configs and the registry of methods",
    "report": "Reports and plots",
}


def on_files(files, config):
    """Adds the generated pages."""
    names = _public_names()
    listed = {room: [] for room in ROOMS}
    for name, module in sorted(names.items()):
        listed[_room(module)].append(f"fedcodist.{module}.{name}")
    overview = [
        "# API",
        "",
        "Every name that `import fedcodist as fc` gives, by the room that holds it.",
        "",
    ]
    for room, title in ROOMS.items():
        if not listed[room]:
            continue
        page = f"api/{room.replace('.', '_')}.md"
        overview += [
            f"- [{title}]({Path(page).name}): "
            + ", ".join(f"`{path.rpartition('.')[2]}`" for path in listed[room])
        ]
        lines = [f"# {title}", "", *(f"::: {path}\n" for path in listed[room])]
        files.append(File.generated(config, page, content="\n".join(lines)))
    files.append(File.generated(config, "api/index.md", content="\n".join(overview)))
    return files


def _public_names() -> dict[str, str]:
    """Name -> module, without importing what the names stand for."""
    spec = importlib.util.spec_from_file_location("fedcodist_table", PACKAGE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._MODULE_OF


def _room(module: str) -> str:
    return max((room for room in ROOMS if module.startswith(f"{room}.")), key=len)
