"""A hook of mkdocs: pages of the API from the table of public names, and the pages beside README."""

import importlib.util
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fedcodist" / "__init__.py"
# Pages that programs write into the top level -> where the site has them.
BESIDE_README = {"RESULTS.md": "results/index.md", "BENCHMARKS.md": "benchmarks.md"}
ROOMS = {
    "core": "What a method is made of",
    "compression": "Compressed links",
    "privacy": "Privacy and secure sums",
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
# What authors of methods call besides: module -> names.
OF_AUTHORS = {
    "core.local_training": ["TrainedClient"],
    "core.keys": ["derive"],
    "core.inputs": ["Round", "ClientData", "Examples"],
    "core.batches": ["one_view", "beside_targets"],
    "core.communication": ["Communication", "tree_bytes"],
    "core.parts": ["choice_of"],
    "core.method": ["ClientModels", "PersonalModel", "single_model"],
    "core.model": ["variable_shapes"],
    "core.trees": ["is_finite"],
    "core.local_steps": ["train_steps", "start_learners", "check_step_training"],
    "core.layer_outputs": ["with_layers"],
    "models.headed": ["embedding_of", "apply_head", "split_head", "with_head", "check_heads"],
    "algorithms.clients.fed_avg": ["client_result", "learning_rates"],
    "algorithms.pools.assemble": ["assemble"],
    "algorithms.pools.pool": ["check_pools", "check_class_counts", "check_sends_models"],
    "algorithms.pools.pool_rounds": ["train_pools", "update_servers", "set_models"],
    "algorithms.pools.codistillation": ["codistill", "codistillation_targets"],
    "algorithms.parties.party": [
        *(
            "run_parties",
            "PartyResult",
            "PartiesResult",
            "assemble",
            "party_metrics",
            "training_loss",
            "init_models",
        ),
        *("training_metrics", "party_predictors", "everybody"),
    ],
    "algorithms.parties.reductions": ["sums"],
    "algorithms.parties.shared_examples": ["shared_examples", "all_examples", "inference"],
    "algorithms.parties.groups": [
        *("check_groups", "party_names", "same_for_all", "all_clients", "by_architecture"),
        *("in_client_order", "check_no_gap"),
    ],
    "algorithms.parties.prototypes": [
        *("ClassSums", "Prototypes", "class_sums", "prototypes_of", "prototype_loss"),
        *("no_prototypes", "prototype_bytes", "check_prototype_groups"),
    ],
    "algorithms.parties.nearest_prototype": ["prototype_predictors"],
    "algorithms.graph.local_only_steps": ["train_alone"],
    "algorithms.graph.graphs": [
        *("complete", "directed_cycle", "islands", "random_graph", "time_varying", "adjacency"),
        *("cut", "at_round", "mean_over_neighbours", "check_neighbours"),
    ],
    "distillation.loop": ["distill", "frozen"],
    "distillation.settings": ["check_distillation"],
    "distillation.unlabelled_batches": ["unlabelled_indices"],
    "distillation.divergences": ["kl_divergence", "softened"],
    "distillation.ensembles": ["mean_logits"],
    "config.registry": ["Entry", "register"],
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
        "Every name that `import fedcodist as fc` gives, by the package that contains it.",
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
    lines = [
        "# For authors of methods",
        "",
        "The functions that [Writing a method](../writing_a_method/index.md) calls.",
    ]
    for module, called in OF_AUTHORS.items():
        lines += ["", f"## `fedcodist.{module}`", ""]
        lines += [f"::: fedcodist.{module}.{name}\n" for name in called]
    files.append(File.generated(config, "api/authors.md", content="\n".join(lines)))
    overview += [
        "",
        "[For authors of methods](authors.md): functions for writing a method.",
    ]
    files.append(File.generated(config, "api/index.md", content="\n".join(overview)))
    for source, page in BESIDE_README.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_moved(text, page, config.repo_url)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links of docs/ to files outside it lead to pages made of these files, or to the repository."""
    up = "../" * (page.file.src_uri.count("/") + 1)
    for source, target in BESIDE_README.items():
        markdown = markdown.replace(f"]({up}{source}", f"]({up.removeprefix('../')}{target}")
    return re.sub(rf"\]\({re.escape(up)}(?!\.\.)", f"]({config.repo_url}/blob/main/", markdown)


def on_post_page(output, page, config):
    """The theme would ask GitHub for stars and versions; the site makes no requests to other hosts."""
    return output.replace(' data-md-component="source"', "")


def on_post_template(output_content, template_name, config):
    """The same for pages that have no source, such as 404.html."""
    return output_content.replace(' data-md-component="source"', "")


def _moved(text: str, page: str, repository: str) -> str:
    """The text with links that were relative to the top level."""
    folder = f"{Path(page).parent}/" if "/" in page else ""
    text = text.replace("](docs/" + folder, "](")
    return re.sub(
        r"\]\((?!https?:|#|[\w.-]+\.(?:md|png)|benchmarks/)", f"]({repository}/blob/main/", text
    )


def _public_names() -> dict[str, str]:
    """Name -> module, without importing what the names stand for."""
    spec = importlib.util.spec_from_file_location("fedcodist_table", PACKAGE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._MODULE_OF


def _room(module: str) -> str:
    return max((room for room in ROOMS if module.startswith(f"{room}.")), key=len)
