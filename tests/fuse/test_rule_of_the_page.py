"""The rule that docs/swap.md shows is the package's own, and can be put in as the page says."""

import inspect
import re
from pathlib import Path

import torch.nn.functional as F

from fastvit_kernels.fuse import backend
from fastvit_kernels.fuse.rules import RULES, Rule, norms
from tests.fuse.hosts import Host, check
from tests.fuse.kit import C

PAGE = Path(__file__).parents[2] / "docs" / "swap.md"


def test_the_page_shows_a_rule_of_the_package():
    assert inspect.getsource(norms.layer_norm) in PAGE.read_text()


def test_a_rule_written_by_the_page_fires(monkeypatch):
    code = re.search(r"^def layer_norm.*?(?=^```)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names = dict(vars(norms))
    exec(code[0].replace('gone, "layer_norm")', 'gone, "mine")'), names)
    mine = Rule(names["layer_norm"], ("layer_norm",))
    monkeypatch.setattr(backend, "RULES", (mine, *RULES))
    host = Host("norm", lambda kit, x: F.layer_norm(x, (C,), kit.n.weight, kit.n.bias, 1e-3))
    assert check(host).rules["mine"] == 1
