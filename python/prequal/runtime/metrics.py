"""The counters of `prequal.stats()` for Prometheus and OpenTelemetry. A client is imported when it is asked for.

Both show every call since the process started: `prequal.reset_stats()` does not touch them, as both systems ask of a
counter. Reading them makes no CUDA call of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .telemetry import Counted

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

__all__ = ["opentelemetry", "prometheus"]

CALLS = "Calls of an op, by who answered and why not the fast path"
OPEN = "1 where the fast path of an op serves now, 0 where the reference does; for what was called on a device"
BUILD = "This installation: version and commit of the wheel, and the fingerprint of this worker (without its devices)"


def prometheus() -> Collector:
    """A collector for a registry of prometheus_client: `REGISTRY.register(prequal.metrics.prometheus())`.

    It yields the counter `prequal_calls_total{op,device,path,reason}` (path: fast, reference or failed; reason: empty
    on the fast path), the gauge `prequal_path_open{op,device}` and `prequal_build_info{version,commit,fingerprint}`.

    Raises:
        ImportError: prometheus_client is not installed.
    """
    try:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise _missing("prometheus_client", "prometheus") from error

    class PrequalCollector(Collector):
        def _families(self) -> tuple[CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily]:
            return (
                CounterMetricFamily("prequal_calls", CALLS, labels=Counted._fields),
                GaugeMetricFamily("prequal_path_open", OPEN, labels=("op", "device")),
                InfoMetricFamily("prequal_build", BUILD),
            )

        def describe(self) -> Iterable[Metric]:
            """The names alone: a registry asks for them when this is registered."""
            return self._families()

        def collect(self) -> Iterable[Metric]:
            calls, is_open, build = self._families()
            for counted, count in sorted(_totals().items()):
                calls.add_metric(counted, count)
            for pair, value in _open_paths().items():
                is_open.add_metric(pair, value)
            build.add_metric((), _build())
            return calls, is_open, build

    return PrequalCollector()


# Providers that have the instruments already: a second set would report every call twice.
_meters: weakref.WeakKeyDictionary[Any, Meter] = weakref.WeakKeyDictionary()


def opentelemetry(meter_provider: MeterProvider | None = None) -> Meter:
    """A meter `prequal` with an observable counter `prequal.calls` and an observable gauge `prequal.path_open`.

    The attributes are the labels of the Prometheus collector. Called again for the same provider, it returns the same
    meter.

    Args:
        meter_provider: default: the global one.

    Raises:
        ImportError: opentelemetry-api is not installed.
    """
    try:
        from opentelemetry.metrics import Observation, get_meter_provider
    except ImportError as error:
        raise _missing("opentelemetry", "otel") from error

    def calls(options: CallbackOptions) -> Iterator[Observation]:
        for counted, count in sorted(_totals().items()):
            yield Observation(count, counted._asdict())

    def is_open(options: CallbackOptions) -> Iterator[Observation]:
        for (op, device), value in _open_paths().items():
            yield Observation(value, {"op": op, "device": device})

    provider = meter_provider if meter_provider is not None else get_meter_provider()
    if provider in _meters:
        return _meters[provider]
    meter = provider.get_meter("prequal", _build()["version"])
    meter.create_observable_counter("prequal.calls", [calls], unit="{call}", description=CALLS)
    meter.create_observable_gauge("prequal.path_open", [is_open], unit="1", description=OPEN)
    _meters[provider] = meter
    return meter


def _missing(module: str, extra: str) -> ImportError:
    return ImportError(f"{module} is not installed: pip install 'prequal[{extra}]'", name=module)


def _totals() -> dict[Counted, int]:
    from prequal import runtime_state

    return runtime_state.telemetry.totals()


def _open_paths() -> dict[tuple[str, str], int]:
    """What was called on a device has made that device's context already, so that the verdict costs no CUDA call."""
    from prequal import runtime_state as state

    found = {}
    for name, device in sorted({(counted.op, counted.device) for counted in _totals()}):
        op = state.native_ops.get(name)
        if op is None:
            continue
        kind, _, index = device.partition(":")
        try:
            verdict = state.gate.verdict(op, int(index) if kind == "cuda" else None, may_run=False)
        except RuntimeError:
            continue  # a forked child inherits the counters and may not use CUDA
        found[name, device] = int(verdict.path == "fast")
    return found


def _build() -> dict[str, str]:
    from prequal import runtime_state as state

    manifest = state.gate.host.manifest
    return {
        "version": manifest.version or "0+unknown",
        "commit": manifest.commit or "",
        "fingerprint": state.fingerprint().sha256,
    }
