from figures import claimed, figures, table
from mutate import ROOT


def test_page_claims_no_more_than_there_is():
    """To write the figures anew: python tests/support/figures.py docs/numerics.md"""
    there = {figure.command: figure.number for figure in figures()}
    page = claimed((ROOT / "docs" / "numerics.md").read_text())
    assert page.keys() == there.keys()
    for command, number in page.items():
        assert 0 < number <= there[command], f"{command}: {number} claimed, {there[command]} there"


def test_table_is_read_as_it_is_written():
    assert claimed(table()) == {figure.command: figure.number for figure in figures()}
    assert claimed("no table") == {}
