"""What patched modules run.

Whether the fast path or the reference answers is the op's own business, here as everywhere. A call that is another case
than the op's goes the way that it went before the patch; it is counted as the op's, with what it did not meet.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as _module
from torch.utils._device import DeviceContext

import prequal
from prequal import runtime_state as state
from prequal.registry import OPS
from prequal.runtime.reasons import unsupported

from .recognise import NormForm, Unrecognised, is_causal_loss

Forward = Callable[..., Any]
# A fake tensor stands for a plain one: torch.export traces with them.
PLAIN = (Tensor, nn.Parameter, FakeTensor)

# Needs of a patched module's calls, besides those of the op itself
ALIKE, BARE, SAME, LAYOUT, LOSS, ROUNDS = "alike", "bare", "same_module", "layout", "loss", "rounds"
NEEDS = {
    ALIKE: "operands of one dtype, shape and device, and no subclass of Tensor: torch promotes, or has other rules",
    BARE: "no hooks on the norm or the activation, and no forward on its instance: a fused call would pass them by",
    SAME: "the norm or the activation that was there when the model was patched",
    LAYOUT: "q and k of [batch, heads, tokens, D], a row of the tables a token; labels of the hidden states' shape",
    LOSS: "the causal-LM loss of transformers, of all of the head's classes",
    ROUNDS: "with exact_rounding no float64, which norms of transformers round to float32",
}


def detoured(op: str, x: Tensor, need: str) -> None:
    """Count a call that goes the way it went before; in strict mode that is an error.

    Not under torch.compile, where nothing is slow that goes another way.
    """
    if not torch.compiler.is_compiling():
        OPS[op].count_fallback((x,), unsupported(need), f"prequal.patch needs {NEEDS[need]}")


_forward_of_linear = nn.Linear.forward


def is_bare(module: nn.Module) -> bool:
    """Calling the module is calling its class's forward: no hooks, no forward of the instance's own (accelerate)."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
        or "forward" in module.__dict__
    )


def alike(*tensors: Tensor) -> bool:
    """One dtype and device, else torch promotes or raises; and no subclass: a DTensor has rules of its own for ops."""
    return all(type(x) in PLAIN and x.dtype == tensors[0].dtype and x.device == tensors[0].device for x in tensors)


def norm(form: NormForm, original: Forward, exact_rounding: bool) -> Forward:
    """The forward of a norm."""

    def normed(self: Any, x: Tensor) -> Tensor:
        if not (alike(x, *_of_one_dtype(form, self)) and self.weight.shape == x.shape[-1:]):
            detoured("rms_norm", x, ALIKE)
            return original(self, x)
        if exact_rounding and x.dtype == torch.float64:
            detoured("rms_norm", x, ROUNDS)
            return original(self, x)
        eps = getattr(self, form.eps)
        # On q as attention wants it, [batch, heads, tokens, D], the rows lie as [batch, tokens, heads, D].
        swapped = x.dim() == 4 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous()
        y = prequal.rms_norm(
            x.transpose(1, 2) if swapped else x,
            self.weight,
            eps,
            weight_offset=form.offset,
            exact_rounding=exact_rounding and not form.rounds_once,
        )
        return y.transpose(1, 2) if swapped else y

    def by_x(self: Any, x: Tensor) -> Tensor:
        return normed(self, x)

    def by_hidden_states(self: Any, hidden_states: Tensor) -> Tensor:
        return normed(self, hidden_states)

    # whoever names the argument must find it under the name it had
    named = {"x": by_x, "hidden_states": by_hidden_states}
    forward = named.get(list(inspect.signature(original).parameters)[1])
    if forward is None:
        raise Unrecognised("its forward names its argument as no norm that is known does")
    return forward


def _of_one_dtype(form: NormForm, module: Any) -> tuple[Tensor, ...]:
    """What must have x's dtype: the op's result has it, and Gemma's whatever the weight is; Llama's is promoted."""
    return () if form.rounds_once else (module.weight,)


def add_norm(form: NormForm, known: tuple[type, ...], exact_rounding: bool) -> Forward:
    """(norm(residual + x), residual + x); `known`: the classes for which the op says what the norm computes."""

    def prequal_add_norm(module: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if type(module) not in known:
            need = SAME
        elif not is_bare(module):
            need = BARE
        elif not (
            alike(x, residual, *_of_one_dtype(form, module))
            and x.shape == residual.shape
            and module.weight.shape == x.shape[-1:]
        ):
            need = ALIKE
        elif exact_rounding and x.dtype == torch.float64:
            need = ROUNDS
        else:
            return prequal.fused_add_rms_norm(
                x,
                residual,
                module.weight,
                getattr(module, form.eps),
                weight_offset=form.offset,
                exact_rounding=exact_rounding and not form.rounds_once,
            )
        detoured("fused_add_rms_norm", x, need)
        total = residual + x
        return module(total), total

    return prequal_add_norm


def gated(kind: str, known: type[nn.Module], exact_rounding: bool) -> Forward:
    """activation(gate) * up, by what `activation_kind` said of activations of the class `known`."""
    op, *more = kind.split()  # "geglu tanh" is geglu(gate, up, "tanh")

    def prequal_gated(activation: nn.Module, projection: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
        need = None
        # one class may have several kinds, as torch's GELU has
        if type(activation) is not known or activation_kind(activation) != kind:
            need = SAME
        elif not is_bare(activation):
            need = BARE
        elif not (alike(gate, up) and gate.shape == up.shape):
            need = ALIKE
        if need is not None:
            detoured(op, gate, need)
            return activation(gate) * up
        # who switches an op off means its in-place form too
        in_place = _is_nobodys(projection, gate, up) and state.flags.disabled(op) is None
        return getattr(prequal, op + "_" if in_place else op)(gate, up, *more, exact_rounding=exact_rounding)

    return prequal_gated


def _is_nobodys(projection: nn.Module, gate: Tensor, up: Tensor) -> bool:
    """Whether the gate may be overwritten: nobody else has it. It is a third of a decoder layer's peak memory.

    What a plain linear layer returns is new; a hook or a mode may have kept it, or who has put another forward into
    nn.Linear, and autograd may need it. torch.compile plans its memory by itself.
    """
    return (
        not torch.compiler.is_compiling()
        and type(projection) is nn.Linear
        and nn.Linear.forward is _forward_of_linear
        and is_bare(projection)
        and not _is_watched()
        and not (gate.requires_grad or up.requires_grad)
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _is_watched() -> bool:
    """Whether a mode sees what calls return, and may keep it. That of torch.set_default_device keeps nothing."""
    modes = torch.overrides._get_current_function_mode_stack()
    return bool(torch._C._len_torch_dispatch_stack()) or any(not isinstance(mode, DeviceContext) for mode in modes)


def rotary(original: Forward, exact_rounding: bool) -> Forward:
    """In the place of `apply_rotary_pos_emb`."""

    def prequal_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        has_layout = not (args or kwargs) and is_a_row_a_token(q, k, cos, sin)
        if not (has_layout and alike(q, k, cos, sin)):
            detoured("rope", q, ALIKE if has_layout else LAYOUT)
            return original(q, k, cos, sin, *args, **kwargs)
        return rope(q, k, cos, sin, exact_rounding)

    return prequal_rotary


def is_a_row_a_token(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """The model's code broadcasts its tables: one row may stand for all tokens, and several batches for one."""
    return (
        q.dim() == k.dim() == 4
        and q.shape[0] == k.shape[0]
        and q.shape[2:] == k.shape[2:]
        and cos.dim() == 3
        and cos.shape == sin.shape
        and cos.shape[1:] == q.shape[2:]
        and (cos.shape[0] == 1 or cos.shape[0] == q.shape[0])
    )


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, exact_rounding: bool) -> tuple[Tensor, Tensor]:
    """From the layout of transformers to the op's and back.

    Args:
        q, k: [batch, heads, tokens, D], as a rule views of [batch, tokens, heads, D].
        cos, sin: [batch or 1, tokens, D], both halves alike.
    """
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    if cos.shape[0] == 1:  # every sequence has the same positions
        q, k = prequal.rope(q, k, cos[0], sin[0], exact_rounding=exact_rounding)
    else:  # a row of the tables for every token of every sequence
        rows = q.shape[:2]
        q, k, cos, sin = (x.flatten(0, 1) for x in (q, k, cos, sin))
        q, k = prequal.rope(q, k, cos, sin, exact_rounding=exact_rounding)
        q, k = q.unflatten(0, rows), k.unflatten(0, rows)
    return q.transpose(1, 2), k.transpose(1, 2)


def head_loss(
    model: Any, head: Any, hidden: Tensor, labels: Tensor | None, named: dict[str, Any], is_capped: bool
) -> Tensor | None:
    """The loss of a causal language model in training, without its logits; None where they are asked for."""
    if labels is None or not model.training:
        return None
    shifted = named.get("shift_labels")
    if shifted is None:
        ignored = named.get("ignore_index", -100)
        shifted = nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
    need = None
    if type(head) is not nn.Linear:
        need = SAME
    elif not is_bare(head):
        need = BARE
    elif not (torch.is_autocast_enabled(hidden.device.type) or alike(hidden, head.weight)):
        need = ALIKE
    elif shifted.shape != hidden.shape[:-1]:
        need = LAYOUT
    elif head.out_features != model.config.vocab_size or not is_causal_loss(model.loss_function):
        need = LOSS
    if need is not None:
        detoured("cross_entropy_chunk_", hidden, need)
        return None
    items = named.get("num_items_in_batch")
    loss: Tensor = prequal.linear_cross_entropy(
        hidden,
        head.weight,
        shifted.to(hidden.device),
        bias=head.bias,
        ignore_index=named.get("ignore_index", -100),
        reduction="mean" if items is None else "sum",
        softcap=model.config.final_logit_softcapping if is_capped else None,
    )
    if items is None:
        return loss
    return loss / (items.to(loss.device) if isinstance(items, Tensor) else items)


# ---- activations -----------------------------------------------------------------------------------------------------


def activation_kind(activation: object) -> str | None:
    """ "swiglu", "geglu tanh" or "geglu none": the op that multiplies this activation; None for every other."""
    cls = type(activation)
    if cls is nn.SiLU:
        return "swiglu"
    if cls is nn.GELU:
        return f"geglu {activation.approximate}"  # type: ignore[attr-defined]
    if cls.__module__ != "transformers.activations":
        return None
    if cls.__name__ in ("SiLUActivation", "SiLU"):
        return "swiglu"
    act = getattr(activation, "act", None)  # of transformers' two, a function that it picked
    if cls.__name__ == "GELUActivation" and act is torch.nn.functional.gelu:
        return "geglu none"
    if cls.__name__ == "PytorchGELUTanh" and act is None:  # of 4.x: its forward calls torch's
        return "geglu tanh"
    if cls.__name__ in ("GELUTanh", "PytorchGELUTanh") and getattr(act, "func", None) is torch.nn.functional.gelu:
        return "geglu tanh" if getattr(act, "keywords", None) == {"approximate": "tanh"} else None
    return None
