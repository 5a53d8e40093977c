"""The settings of `data` that each data set reads. Setting another one is an error: it has no effect."""

from ml_collections import ConfigDict

# Those that all data have; the others are arguments of a user's function that loads data.
OF_ALL = (
    "name",
    "seed",
    "division_per_seed",
    "preprocess",
    "evaluation_preprocess",
    "partition",
    "client_test_share",
    "unseen_clients",
)
_IMAGES = ("crop", "padding", "augmentation", "mean", "deviation")
_ENCODED = ("folder", "num_clients", "encoder", "frozen_tables", "positive_copies")
_SHARES = ("public_share", "private_share")
_PRIMARY = ("num_clients", "assignment", "labels_per_client", "skew", *_SHARES)
_PARTIES = ("num_parties", "per_class")
_TWO_FOLDERS = ("folder", "public_folder", "iid")

READ: dict[str, tuple[str, ...]] = {
    "digits": ("num_clients", "concentration"),
    "prepared": ("folder", "unlabelled_folder", "num_unlabelled", *_IMAGES),
    "prepared_text": ("folder", "unlabelled_folder", "domains"),
    "prepared_sentences": _ENCODED,
    "prepared_news": _ENCODED,
    "digits_primary": (*_PRIMARY, "test_share", "held_out_share"),
    "prepared_primary": (*_PRIMARY, "folder", "tested", *_IMAGES),
    "digits_public_private": (*_PARTIES, "held_out_share"),
    "cifar_public_private": (*_PARTIES, *_TWO_FOLDERS, "paper_superclasses", "num_public"),
    "letters_public_private": (*_PARTIES, *_TWO_FOLDERS, "smallest"),
}


def check_read(settings: ConfigDict) -> None:
    """Raises ValueError that names a setting of `data` which data of this name do not read.

    A setting that is None may be there. Names of data of one's own are not checked, since their
    functions have settings of their own.
    """
    if settings.name not in READ:
        return
    read = READ[settings.name]
    for name, value in settings.items():
        if value is not None and name not in (*OF_ALL, *read):
            raise ValueError(
                f"data.{name} must be None with data.name={settings.name!r}, which does not read it; "
                f"it reads {', '.join(sorted(read))}."
            )
