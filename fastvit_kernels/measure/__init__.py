"""How speed is measured: one timer, contenders in turns, a gate before any speed-up.

timer         CUDA events around a call with a cold cache; CUDA graphs without the host; memory
turns         contenders measured in turn, so that a drifting clock drifts for all; medians, spread
gate          no speed-up without right numbers: outputs and every gradient by the 2x rule
model_errors  a model's outputs and gradients against its host's
compare       fk.compare: a model in several ways; comparison: what it found
"""
