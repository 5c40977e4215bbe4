"""Forty random ViTs; `python -m tests.fuse.random_hosts` draws as many as you like."""

import pytest

from tests.fuse.hosts import check
from tests.fuse.random_hosts import random_host


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(40))
def test_a_random_vit_is_the_host(number):
    check(random_host(0, number))


def test_a_seed_draws_the_same_again():
    assert random_host(3, 1).id == random_host(3, 1).id != random_host(3, 2).id
