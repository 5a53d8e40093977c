"""Settings of `data` that data of this name do not read are errors."""

import pytest
from ml_collections import ConfigDict

from fedcodist.config.allowed_settings import ALLOWED
from fedcodist.config.data import load_data
from fedcodist.config.data_bert import ENCODED
from fedcodist.config.data_graph import PRIMARY
from fedcodist.config.data_parties import PUBLIC_PRIVATE
from fedcodist.config.data_settings import READ, check_read
from fedcodist.config.data_text import TEXT


def test_every_name_is_in_the_table_and_every_setting_in_it_exists():
    assert set(READ) == {"digits", "prepared", TEXT, *ENCODED, *PUBLIC_PRIVATE, *PRIMARY}
    assert {setting for read in READ.values() for setting in read} <= {
        name.split(".")[1] for name in ALLOWED if name.startswith("data.")
    }


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("digits", "crop", 6),
        ("digits", "folder", "data/cifar100"),
        ("prepared", "concentration", 0.1),
        ("prepared", "num_clients", 10),
        ("prepared_text", "crop", 24),
        ("digits_public_private", "iid", False),
        ("digits_primary", "augmentation", "per_image"),
    ],
)
def test_a_setting_that_these_data_do_not_read_is_an_error(name, setting, value):
    with pytest.raises(ValueError, match=f"data.{setting} must be None with data.name='{name}'"):
        load_data(ConfigDict({"name": name, setting: value}))


def test_a_setting_that_is_none_may_be_there():
    check_read(ConfigDict({"name": "digits", "crop": None, "client_test_share": 0.2}))


def test_data_of_ones_own_have_their_own_settings():
    check_read(ConfigDict({"name": "my_data:load", "crop": 24}))
