"""One registry of methods: all that builders, tables and FLOPs know of a method is its `Entry`.

A method from outside is registered by its module, which a config names:

    register(Entry("my_method", "MyMethod", POOLS, "my_package.my_method:my_method", ("unlabelled",)))

    config.methods = ("my_package.my_method",)
    config.algorithm = dict(name="my_method", temperature=2.0)

A config may also name its function, or its Entry:

    config.algorithm = dict(name="my_package.my_method:my_method", temperature=2.0)

A function's Entry is then made from its arguments: it reads "unlabelled" data if it has the argument
`num_unlabelled`, "public" data with `num_public`, "shared" data with `num_shared`. As `algorithm.name`
it is a method of pools, of parties or of a graph, if the config has `pools`, `parties` or
`parties.graph`. As `training.method` it is a method of clients, and its settings are those of
`training.<the function's name>`.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedcodist.config import passes
from fedcodist.config.references import choice_or_reference, imported, is_reference, value_at

# How a client trains (`training.method`); what a server does with pools' models, parties, who have
# networks of their own, and clients on a graph (`algorithm.name`).
KINDS = CLIENTS, POOLS, PARTIES, GRAPH = ("clients", "pools", "parties", "graph")


class Entry(NamedTuple):
    """A method.

    Attributes:
      name: in configs.
      title: in tables and legends.
      kind: where it may stand, one of KINDS.
      make: the method's function, or "package.module:function", which is imported when it is needed.
        Its arguments are those in OFFERS of the kind's module in `fedcodist.config`, and settings.
      reads: what it needs besides clients' examples: the data sets "unlabelled", "public" and "shared",
        the models' "logits" or layers, which text does not have, and auxiliary "heads".
      passes: counts FLOPs; None if they are unknown. `work` is a `fedcodist.report.work.Work`.
        For "clients" `passes(work, pool)` is the cost of learning from one example. For "pools"
        `passes(work)` is the server's FLOPs of a run, or `Flops`, whose clients' part is added to the
        cost of the clients' own method. For the others `passes(work)` is the run's `Flops`.
      paper: a link, or "".
    """

    name: str
    title: str
    kind: str
    make: str | Callable[..., Any]
    reads: tuple[str, ...] = ()
    passes: Callable[..., Any] | None = None
    paper: str = ""


ENTRIES: dict[str, Entry] = {}  # in the order of tables and legends
METHOD_NAMES: dict[str, str] = {}  # name -> title
_DATA_SETS = ("unlabelled", "public", "shared")  # besides clients' examples
_READS = (*_DATA_SETS, "logits", "heads")
BASELINE = "fed_avg"  # as `algorithm.name`: independent pools
CODISTILLATION = ("periodic_codistillation", "merged_codistillation")
METHODS = (BASELINE, *CODISTILLATION)  # those of the codistillation paper


def is_of_the_library(name: str) -> bool:
    """Whether a method of this name is registered, and its function is this library's."""
    entry = ENTRIES.get(name)
    return entry is not None and str(entry.make).startswith("fedcodist.")


def register(entry: Entry) -> None:
    """Adds a method; adding the same method again changes nothing.

    Raises:
      ValueError: names the argument: another method has the name or the title, or there is no such kind.
    """
    if entry.kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {entry.kind!r} of {entry.name!r}.")
    if isinstance(entry.reads, str):
        raise TypeError(f"reads must be a tuple of names, got {entry.reads!r} of {entry.name!r}.")
    for name in entry.reads:
        if name not in _READS:
            raise ValueError(f"reads must be of {_READS}, got {name!r} of {entry.name!r}.")
    known = ENTRIES.get(entry.name, entry)
    if known.kind != entry.kind or not _is_same_function(known.make, entry.make):
        raise ValueError(
            f"name must be of no other method, got {entry.name!r} of {_place(entry.make)}, which is "
            f"that of {_place(known.make)}."
        )
    others = {title: name for name, title in METHOD_NAMES.items() if name != entry.name}
    if entry.title in others:
        raise ValueError(
            f"title must be of no other method, got {entry.title!r} of {entry.name!r}, which is that of "
            f"{others[entry.title]!r}."
        )
    ENTRIES[entry.name] = entry
    METHOD_NAMES[entry.name] = entry.title


def load_methods(config: Mapping[str, Any]) -> None:
    """Imports the modules that `config.methods` names, which register their methods.

    Raises:
      ValueError: names the module that cannot be imported, and the line that failed.
    """
    for module in config.get("methods") or ():
        imported("methods", module, module)


def client_entry(config: Mapping[str, Any]) -> Entry:
    """The method by which clients train; FedAvg where `training.method` is not set."""
    load_methods(config)
    name = config["training"].get("method", BASELINE)
    if is_reference(name):
        return _referenced("training.method", name, CLIENTS)
    known = {name: entry for name, entry in ENTRIES.items() if entry.kind == CLIENTS}
    return choice_or_reference("training.method", name, known)


def algorithm_entry(config: Mapping[str, Any]) -> Entry:
    """The method that `algorithm.name` names."""
    load_methods(config)
    name = config["algorithm"]["name"]
    if is_reference(name):
        parties = config.get("parties")
        of_parties = PARTIES if parties is None or "graph" not in parties else GRAPH
        return _referenced("algorithm.name", name, POOLS if parties is None else of_parties)
    known = {n: entry for n, entry in ENTRIES.items() if entry.kind != CLIENTS or n == BASELINE}
    return choice_or_reference("algorithm.name", name, known)


def _referenced(setting: str, reference: str, kind: str) -> Entry:
    """The Entry to which a reference refers, or an Entry made from the function to which it refers.

    Raises:
      ValueError: names the setting: the reference leads nowhere, or this kind is not allowed there.
    """
    value = value_at(setting, reference)
    if isinstance(value, Entry):
        if value.kind != kind:
            raise ValueError(
                f"{setting} must be a method of {kind}, got {reference!r}, one of {value.kind}."
            )
        return value
    if not inspect.isfunction(value):
        raise ValueError(
            f"{setting} must be a method's function or its Entry, got {reference!r}, which is of type "
            f"{type(value).__name__}."
        )
    parameters = inspect.signature(value).parameters
    if kind == CLIENTS and (of_server := [n for n in ("pools", "groups") if n in parameters]):
        raise ValueError(
            f"{setting} must be a method of clients, got {reference!r} with an argument "
            f"{of_server[0]!r}: such a method is named by algorithm.name."
        )
    reads = tuple(name for name in _DATA_SETS if f"num_{name}" in parameters)
    return Entry(value.__name__, value.__name__, kind, value, reads)


def function_of(entry: Entry) -> Callable[..., Any]:
    """The method's function."""
    if not isinstance(entry.make, str):
        return entry.make
    return value_at(f"make of {entry.name!r}", entry.make)


def method_of(config: Mapping[str, Any]) -> str:
    """The name of a run's method.

    It is the server's method, or the clients' where the server only averages. A run of a phase has the
    phase's name. A config that names no algorithm has the experiment's name.
    """
    algorithm = config.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
    training = config.get("training")
    if name == BASELINE and isinstance(training, Mapping):
        name = training.get("method", name)
    if not name and config.get("phase"):
        name = f"{config['phase']} training"
    return str(name or config.get("name") or "unnamed")


def run_title(config: Mapping[str, Any]) -> str:
    """The title of a run's progress: experiment, run and method, each name once."""
    parts = (config.get("name"), config.get("run"), method_of(config))
    return " · ".join(dict.fromkeys(str(part) for part in parts if part))


def _place(make: str | Callable[..., Any]) -> str:
    if isinstance(make, str):
        return make
    return f"{make.__module__}:{getattr(make, '__qualname__', type(make).__name__)}"


def _is_same_function(one: str | Callable[..., Any], other: str | Callable[..., Any]) -> bool:
    """Whether two methods have one function.

    A config file is loaded under another name than the module that `config.methods` imports from it, so
    functions also count as the same if their files and names are.
    """
    if _place(one) == _place(other):
        return True
    if not (inspect.isfunction(one) and inspect.isfunction(other)):
        return False
    first, second = ((m.__qualname__, _file_of(m)) for m in (one, other))
    return first == second


def _file_of(function: Callable[..., Any]) -> Path:
    return Path(inspect.unwrap(function).__code__.co_filename).resolve()


_UNLABELLED = ("unlabelled", "logits")
_DEPTH_FL_PAPER = "openreview.net/forum?id=pf8RIZTMU58"
_CODISTILLATION_PAPER, _MHD_PAPER = "2310.02549", "2211.15774"
# (name, title, kind, what it reads, FLOPs, arXiv's number or a page); its module and its function have
# its name.
_OURS: tuple[tuple[str, str, str, tuple[str, ...], Callable[..., Any] | None, str], ...] = (
    ("fed_avg", "FedAvg", CLIENTS, (), passes.learning, "1602.05629"),
    ("fed_prox", "FedProx", CLIENTS, (), passes.learning, "1812.06127"),
    ("fed_gkd", "FedGKD", CLIENTS, ("logits",), passes.with_teacher, "2107.00051"),
    ("fed_ntd", "FedNTD", CLIENTS, ("logits",), passes.with_teacher, "2106.03097"),
    ("moon", "MOON", CLIENTS, ("logits",), passes.moon, "2103.16257"),
    ("scaffold", "SCAFFOLD", CLIENTS, (), passes.scaffold, "1910.06378"),
    ("fed_per", "FedPer", CLIENTS, (), passes.learning, "1912.00818"),
    ("fed_rep", "FedRep", CLIENTS, (), passes.fed_rep, "2102.07078"),
    ("fed_bn", "FedBN", CLIENTS, (), passes.learning, "2102.07623"),
    ("fed_babu", "FedBABU", CLIENTS, (), passes.learning, "2106.06042"),
    ("lg_fed_avg_one", "LG-FedAvg, one network", CLIENTS, (), passes.learning, "2001.01523"),
    ("ditto", "Ditto", CLIENTS, (), passes.learning, "2012.04221"),
    ("apfl", "APFL", CLIENTS, (), passes.apfl, "2003.13461"),
    ("p_fed_me", "pFedMe", CLIENTS, (), passes.p_fed_me, "2006.08848"),
    ("per_fed_avg", "Per-FedAvg", CLIENTS, (), passes.per_fed_avg, "2002.07948"),
    ("hetero_fl", "HeteroFL", POOLS, ("logits",), passes.nothing, "2010.01264"),
    ("fed_rolex", "FedRolex", POOLS, ("logits",), passes.nothing, "2212.01548"),
    ("fjord", "FjORD", POOLS, ("logits",), passes.fjord, "2102.13451"),
    ("depth_fl", "DepthFL", POOLS, ("logits",), passes.nothing, _DEPTH_FL_PAPER),
    ("fetch_sgd", "FetchSGD", CLIENTS, (), passes.learning, "2007.07682"),
    ("fed_dropout", "Federated Dropout", CLIENTS, ("logits",), passes.fed_dropout, "1812.07210"),
    ("fed_kd", "FedKD", CLIENTS, ("logits",), passes.fed_kd, "2108.13323"),
    ("fed_df", "FedDF", POOLS, _UNLABELLED, passes.fed_df, "2006.07242"),
    ("fed_be", "FedBE", POOLS, _UNLABELLED, passes.fed_be, "2009.01974"),
    ("fed_sdd", "FedSDD", POOLS, _UNLABELLED, passes.fed_sdd_pools, "2312.17029"),
    (
        "fed_sdd_pools",
        "FedSDD of several architectures",
        POOLS,
        _UNLABELLED,
        passes.fed_sdd_pools,
        "2312.17029",
    ),
    ("fed_et", "Fed-ET", POOLS, _UNLABELLED, passes.fed_et, "2204.12703"),
    ("fed_ensemble", "Fed-ensemble", POOLS, ("logits",), passes.nothing, "2107.10663"),
    ("local_only", "no collaboration", PARTIES, (), passes.alone, ""),
    ("fed_md", "FedMD", PARTIES, ("public",), passes.fed_md, "1910.03581"),
    ("fd", "FD", PARTIES, (), passes.fd, "1811.11479"),
    ("ds_fl", "DS-FL", PARTIES, ("public",), passes.ds_fl, "2008.06180"),
    ("fml", "FML", PARTIES, (), passes.fml, "2006.16765"),
    (
        "fed_kd_parties",
        "FedKD, teachers of different networks",
        PARTIES,
        (),
        passes.fed_kd_parties,
        "2108.13323",
    ),
    ("fed_proto", "FedProto", PARTIES, (), passes.fed_proto, "2105.00243"),
    ("fed_gh", "FedGH", PARTIES, (), passes.fed_gh, "2303.13137"),
    ("fed_tgp", "FedTGP", PARTIES, (), passes.fed_tgp, "2401.03230"),
    ("kt_pfl", "KT-pFL", PARTIES, ("public",), passes.kt_pfl, "2111.02862"),
    ("lg_fed_avg", "LG-FedAvg", PARTIES, (), passes.alone, "2001.01523"),
    ("fed_gen", "FedGen", PARTIES, (), passes.fed_gen, "2105.10056"),
    ("fccl", "FCCL", PARTIES, ("public",), passes.fccl, "doi.org/10.1109/CVPR52688.2022.00990"),
    ("fed_mrl", "FedMRL", PARTIES, (), passes.fed_mrl, "2406.00488"),
    ("fed_l2g", "FedL2G", PARTIES, (), passes.fed_l2g, "2410.06490"),
    ("local_only_steps", "separate clients", GRAPH, (), passes.alone, ""),
    ("decentralised_fed_avg", "decentralised FedAvg", GRAPH, (), passes.alone, ""),
    (
        "decentralised_periodic_codistillation",
        "decentralised PeriodicCodist",
        GRAPH,
        ("public",),
        passes.decentralised_periodic,
        _CODISTILLATION_PAPER,
    ),
    (
        "multi_headed_distillation",
        "MHD",
        GRAPH,
        ("public", "heads"),
        passes.multi_headed,
        _MHD_PAPER,
    ),
    ("centralised", "all examples in one place", GRAPH, ("shared",), passes.alone, ""),
    (
        "periodic_codistillation",
        "PeriodicCodist",
        POOLS,
        ("unlabelled",),
        passes.periodic_codistillation,
        _CODISTILLATION_PAPER,
    ),
    (
        "merged_codistillation",
        "MergedCodist",
        POOLS,
        ("unlabelled",),
        passes.merged_codistillation,
        _CODISTILLATION_PAPER,
    ),
)
for _name, _title, _kind, _reads, _passes, _paper in _OURS:
    _make = f"fedcodist.algorithms.{_kind}.{_name}:{_name}"
    _link = _paper and f"https://{_paper if '/' in _paper else f'arxiv.org/abs/{_paper}'}"
    register(Entry(_name, _title, _kind, _make, _reads, _passes, _link))
# Methods whose pools train parts of one network.
OF_LEVELS = ("hetero_fl", "fed_rolex", "fjord", "depth_fl")
# Those of clients on a graph.
DECENTRALISED = tuple(n for n, e in ENTRIES.items() if e.kind == GRAPH and "shared" not in e.reads)
