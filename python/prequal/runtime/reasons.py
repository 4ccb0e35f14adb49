"""Why an op was answered by its reference: one enumeration for gate, telemetry, doctor and tests."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """A closed set. `unsupported_input` is always followed by `:<need>`, the name of the need that was not met."""

    NO_NATIVE_MODULE = "no_native_module"
    NO_CUDA = "no_cuda"
    DRIVER_TOO_OLD = "driver_too_old"
    ARCH_NOT_BUILT = "arch_not_built"
    DISABLED_BY_FLAG = "disabled_by_flag"
    NOT_QUALIFIED = "not_qualified"
    QUALIFICATION_FAILED = "qualification_failed"
    UNSUPPORTED_INPUT = "unsupported_input"
    RUNTIME_ERROR = "runtime_error"


# Needs that belong to the boundary and not to one op: what they mean, for people.
BOUNDARY_NEEDS = {
    "cuda": "the tensors are on the CPU",
    "dense": "a tensor without plain memory (sparse, or a subclass that hides it)",
    "negation": "a tensor with a pending negation (the imaginary part of a conjugate)",
    "rank": "more than 8 dimensions",
    "transform": "under torch.func's grad or jvp, or with a forward-mode tangent: the reference has every rule",
    "kernel": "an op that has no kernel",
}


def unsupported(need: str) -> str:
    return f"{Reason.UNSUPPORTED_INPUT}:{need}"


def is_reason(text: str) -> bool:
    """True for a member of the enumeration, with its need where it has one."""
    head, colon, need = text.partition(":")
    if head == Reason.UNSUPPORTED_INPUT:
        return bool(colon and need)
    return not colon and head in set(Reason)
