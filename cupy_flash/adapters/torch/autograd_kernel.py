"""`register_autograd`: the Autograd kernel of an operator that has neither defaults nor lists of tensors.

`torch.library.register_autograd` fills in default arguments at every call, which reads the schema once for every
argument, in time quadratic in their number: some 180 us for the operators of attention. Their schemas have no defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def register_autograd(library: Any, operator: Any, backward: Callable[..., Any], save: Callable[..., None]) -> None:
    """Record an operator for autograd, as `torch.library.register_autograd` does.

    Args:
        library: the torch.library.Library that defines the operator.
        operator: the overload, of which no argument has a default and none is a list of tensors.
        backward: from (ctx, *gradients of the results) to the gradients of the arguments.
        save: the function `setup_context(ctx, inputs, output)`.
    """

    def below(keyset: Any, arguments: Sequence[Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    def forward(ctx: Any, *arguments_and_keyset: Any) -> Any:
        *arguments, keyset = arguments_and_keyset  # the keyset comes last: the arguments keep their places
        results = below(keyset, arguments)
        save(ctx, arguments, results)
        return results

    def differentiate(ctx: Any, *gradients: Any) -> Any:
        return (*backward(ctx, *gradients), None)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
    name = f"{operator._namespace}_{operator._opname}"  # of the node in a graph
    recorded: Any = type(name, (torch.autograd.Function,), methods)

    def kernel(keyset: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return recorded.apply(*arguments, keyset)
        return below(keyset, arguments)

    library.impl(operator._opname, kernel, "Autograd", with_keyset=True)
