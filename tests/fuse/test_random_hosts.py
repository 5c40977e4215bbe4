"""Random ViTs and blocks of libraries; `python -m tests.fuse.random_hosts` draws more."""

import pytest

from tests.fuse.hosts import check
from tests.fuse.random_hosts import packaged_host, random_host

pytestmark = [pytest.mark.sampled(every=4), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("number", range(24))
def test_a_random_vit_is_the_host(number):
    check(random_host(0, number))


@pytest.mark.parametrize("number", range(16))
def test_a_packages_block_of_random_settings_is_the_host(number):
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    check(packaged_host(0, number))
