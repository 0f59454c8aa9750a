"""`register_autograd`: adds autograd to an operator, and calls it without torch's dispatcher for plain tensors.

The operators must have neither default arguments nor lists of tensors. `torch.library.register_autograd` fills in
defaults at every call by reading the schema once per argument, which takes about 180 us for the operators of attention.
The dispatcher converts every argument twice, which takes about 20 us each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

_interpreter, _trace = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_is_profiled = torch.autograd._profiler_enabled
PLAIN = (torch.Tensor, torch.nn.Parameter)  # types without __torch_function__ of their own


def register_autograd(
    library: Any, operator: Any, run: Callable[..., Any], backward: Callable[..., Any], save: Callable[..., None]
) -> Callable[..., Any]:
    """Record an operator for autograd, as `torch.library.register_autograd` does; return a function that calls it.

    That function calls autograd directly, without the dispatcher, if all tensors are plain.

    Args:
        library: the torch.library.Library that defines the operator.
        operator: the overload; no argument has a default or is a list of tensors.
        run: the kernel for all devices.
        backward: maps (ctx, *gradients of the results) to the gradients of the arguments.
        save: the function `setup_context(ctx, inputs, output)`.
    """

    def below_autograd(keyset: Any, arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    def forward(ctx: Any, *arguments_and_keyset: Any) -> Any:
        *arguments, keyset = arguments_and_keyset  # the keyset is last, so that arguments keep their indices
        results = run(*arguments) if keyset is None else below_autograd(keyset, arguments)
        save(ctx, arguments, results)
        return results

    def differentiate(ctx: Any, *gradients: Any) -> Any:
        return (*backward(ctx, *gradients), None)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
    name = f"{operator._namespace}_{operator._opname}"  # name of the node in a graph
    recorded: Any = type(name, (torch.autograd.Function,), methods)

    def kernel(keyset: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return recorded.apply(*arguments, keyset)
        return below_autograd(keyset, arguments)

    def call(*arguments: Any) -> Any:
        tensors = [x for x in arguments if x is not None and isinstance(x, torch.Tensor)]
        if torch.compiler.is_compiling() or not are_plain(tensors):
            return operator(*arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return recorded.apply(*arguments, None)
        return run(*arguments)

    library.impl(operator._opname, kernel, "Autograd", with_keyset=True)
    return call


def are_plain(tensors: Iterable[Any]) -> bool:
    """Return whether only autograd may observe a call: no mode, transform, trace, profiler or tensor of a subclass.

    A tensor without an address is not plain either: only the dispatcher unwraps the tensors of a transform, which may
    have ended, and allocates the memory of zero tensors.
    """
    if is_observed():
        return False
    try:
        return all(type(x) in PLAIN and (x.is_cuda or x.is_cpu) and x.data_ptr() != 0 for x in tensors)
    except RuntimeError:  # a wrapper of another tensor, or a tensor of a sparse layout
        return False


def is_observed() -> bool:
    """Return whether a mode, transform, trace or profiler of torch is active."""
    return bool(
        _interpreter() is not None
        or forward_ad._current_level >= 0
        or _dispatch_modes()
        or _function_modes()
        or _trace() is not None
        or _is_profiled()
    )


def is_transformed() -> bool:
    """Return whether a transform of torch.func or a level of dual tensors is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
