"""Hosts whose forwards are more than their roles say, each with what makes it so.

| file | special, because |
|---|---|
| bias.py | a bias of relative positions needs the resolution of the call |
| models.py | a model hands its blocks a shorter mask or fewer patches, or draws these first |
| packed.py | sequences lie one after the other, by cu_seqlens |
| parallel.py | attention and MLP side by side |
| towers.py | q and k turn by angles that no table of (T, D) gives |
| windows.py | attention inside windows of a grid, with positions of its own |
"""
