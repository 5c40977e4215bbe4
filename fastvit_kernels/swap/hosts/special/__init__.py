"""Hosts whose forwards are more than their roles say, each with what makes it so.

| file | special, because |
|---|---|
| bias.py | a bias of relative positions needs the resolution of the call |
| mae.py | patches are drawn before they are embedded |
| models.py | a model hands its blocks a shorter mask or fewer patches |
| packed.py | sequences lie one after the other, by cu_seqlens |
| padded.py | a mask of rows that are alike becomes one of the keys |
| parallel.py | branches side by side, or a norm behind each |
| sam.py, windows.py | attention inside windows of a grid, with positions of its own |
| towers.py | q and k turn by angles that no table of (T, D) gives, or by the host's own |
"""
