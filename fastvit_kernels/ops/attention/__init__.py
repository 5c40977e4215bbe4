"""Attention: called by functions, projected, sdpa, rotary and varlen, run by one set of kernels."""
