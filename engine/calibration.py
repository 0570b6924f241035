"""How large the inputs of a model's linear layers are: what int8 weights are prepared for.

In a language model some channels are many times as large as others, and they are the same ones whatever the text is.
One pass over token ids spread over the vocabulary therefore shows them; no text and no tokenizer are needed. (On the
default model it serves as well as 256 tokens of English.)
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import nn

from ringserve.engine.decoder_weights import InputSizes
from ringserve.engine.self_check import eager_logits, spread_sequences

NUM_TOKENS = 256


def input_sizes(model: nn.Module) -> InputSizes:
    """Of every ``nn.Linear``, by one eager pass in the model's own type. Raises ModelError where that fails."""
    squares: dict[nn.Module, torch.Tensor] = {}
    rows: dict[nn.Module, int] = {}

    def see(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        x = arguments[0].detach().reshape(-1, arguments[0].shape[-1]).float()
        squares[module] = squares.get(module, torch.zeros(x.shape[1])) + x.square().sum(0)
        rows[module] = rows.get(module, 0) + len(x)

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                handle = module.register_forward_pre_hook(see)
                stack.callback(handle.remove)
        eager_logits(model, spread_sequences(model, (NUM_TOKENS,)))
    return {module: (total / rows[module]).sqrt().numpy() for module, total in squares.items() if rows[module]}
