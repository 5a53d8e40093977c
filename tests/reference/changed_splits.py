"""Prepared folders with a split that is changed, for tests of what loaders check."""

from fedcodist.data.federated_data import FederatedData


def change_split(monkeypatch, loader, split, changed):
    """Replaces a split's columns by `changed(columns)` in every folder that module `loader` reads."""
    whole = loader.prepared_folder

    def other(*arguments):
        splits = whole(*arguments)
        return splits | {split: FederatedData.of_one_client(changed(splits[split].columns))}

    monkeypatch.setattr(loader, "prepared_folder", other)
