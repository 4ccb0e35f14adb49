"""The exporters, against the real client libraries: what is scraped or read is what was counted."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request

import pytest
import torch

import prequal
from prequal import runtime_state as state
from prequal.runtime.telemetry import Telemetry

X = torch.ones(2, 8)


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environ}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def counted(machine, make_host, monkeypatch):
    """A process of its own: nothing was counted in it, then a few calls on a mixed host."""
    host = make_host((9, 0), (7, 5))
    monkeypatch.setattr(state, "telemetry", Telemetry(lambda: host.served))
    monkeypatch.setattr(prequal, "stats", state.telemetry.stats)
    machine(host)
    monkeypatch.setattr(state.telemetry, "_fast_calls", lambda: host.served)
    for host.current, times in ((0, 5), (1, 2)):
        for _ in range(times):
            prequal.rms_norm(X)
    host.current = 0
    prequal.rms_norm(X.double())
    state.telemetry.failed("knn", "cuda:0", "runtime_error", "CUDA said no")
    return host


WANTED = {
    ("rms_norm", "cuda:0", "fast", ""): 5,
    ("rms_norm", "cuda:0", "reference", "unsupported_input:dtype"): 1,
    ("rms_norm", "cuda:1", "reference", "arch_not_built"): 2,
    ("knn", "cuda:0", "failed", "runtime_error"): 1,
}
OPEN = {("rms_norm", "cuda:0"): 1, ("rms_norm", "cuda:1"): 0, ("knn", "cuda:0"): 0}


def as_counters(stats) -> dict[tuple[str, str, str, str], int]:
    """stats() as the exporters say it."""
    found = {}
    for op, devices in stats.items():
        for device, row in devices.items():
            if row["fast"]:
                found[op, device, "fast", ""] = row["fast"]
            for path in ("reference", "failed"):
                for reason, count in row.get(path, {}).items():
                    found[op, device, path, reason] = count
    return found


# ---- Prometheus ------------------------------------------------------------------------------------------------------


@pytest.fixture
def scrape():
    """Over HTTP from a real endpoint, and parsed: {family: {labels: value}}."""
    client = pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    registry = client.CollectorRegistry(auto_describe=True)
    registry.register(prequal.metrics.prometheus())
    server, thread = client.start_http_server(0, addr="127.0.0.1", registry=registry)

    def read():
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as answer:
            assert answer.status == 200
            text = answer.read().decode()
        return {family.name: family for family in text_string_to_metric_families(text)}

    yield read
    server.shutdown()
    server.server_close()
    thread.join()


def values(family, *labels: str) -> dict[tuple[str, ...], float]:
    """By these labels, which must be all that a sample has."""
    assert all(sorted(sample.labels) == sorted(labels) for sample in family.samples)
    found = {tuple(sample.labels[name] for name in labels): sample.value for sample in family.samples}
    assert len(found) == len(family.samples)
    return found


def calls(families) -> dict[tuple[str, ...], float]:
    assert {sample.name for sample in families["prequal_calls"].samples} == {"prequal_calls_total"}
    return values(families["prequal_calls"], "op", "device", "path", "reason")


def paths(families) -> dict[tuple[str, ...], float]:
    return values(families["prequal_path_open"], "op", "device")


def test_a_scrape_over_http_says_what_stats_say(counted, scrape):
    families = scrape()
    assert {name: family.type for name, family in families.items()} == {
        "prequal_calls": "counter",
        "prequal_path_open": "gauge",
        "prequal_build_info": "gauge",  # as the text format says an info metric
    }
    assert calls(families) == as_counters(prequal.stats()) == WANTED
    assert paths(families) == OPEN
    (build,) = families["prequal_build_info"].samples
    assert build.value == 1
    assert build.labels == {"version": "1.2.3", "commit": "a" * 40, "fingerprint": state.fingerprint().sha256}


def test_a_later_scrape_says_the_later_counts(counted, scrape):
    scrape()
    for _ in range(3):
        prequal.rms_norm(X)
    assert calls(scrape()) == WANTED | {("rms_norm", "cuda:0", "fast", ""): 8}


def test_a_counter_never_goes_down(counted, scrape):
    """Prometheus takes a lower counter for a restart, and OpenTelemetry for an error."""
    state.telemetry.reset()
    assert prequal.stats() == {}
    assert calls(scrape()) == WANTED


def test_a_scrape_sees_a_path_close(counted, scrape):
    prequal.disable("rms_norm")
    assert paths(scrape())["rms_norm", "cuda:0"] == 0


def test_a_scrape_runs_no_kernel_and_opens_no_path(counted, scrape):
    state.gate.unqualify()
    runs = counted.quick_runs.total()
    scrape()
    assert counted.quick_runs.total() == runs
    assert counted.opened() == set()


def test_a_scrape_survives_a_device_that_cannot_be_asked(counted, scrape, monkeypatch):
    """A forked child inherits the counters, and CUDA refuses it."""

    def refuse(device):
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    state.gate.forget()
    monkeypatch.setattr(counted, "capability", refuse)
    families = scrape()
    assert calls(families) == WANTED
    assert paths(families) == {}


def test_registering_counts_nothing_and_asks_nothing(machine, make_host):
    client = pytest.importorskip("prometheus_client")
    host = machine(make_host())
    registry = client.CollectorRegistry(auto_describe=True)
    registry.register(prequal.metrics.prometheus())
    assert host.asked == {}
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(prequal.metrics.prometheus())


def test_a_process_of_its_own_is_scraped():
    """No simulation: real calls, the default registry, the reason of this machine."""
    pytest.importorskip("prometheus_client")
    code = """if True:
        import sys, torch, prequal
        assert not {"prometheus_client", "opentelemetry"} & set(sys.modules)
        from prometheus_client import REGISTRY, generate_latest
        REGISTRY.register(prequal.metrics.prometheus())
        for _ in range(3):
            prequal.rms_norm(torch.ones(2, 4))
        (device, row), = prequal.stats()["rms_norm"].items()
        (reason, calls), = row["reference"].items()
        wanted = f'prequal_calls_total{{device="{device}",op="rms_norm",path="reference",reason="{reason}"}} {calls}.0'
        print(wanted in generate_latest().decode(), f'commit="{prequal.runtime.manifest.load().commit or ""}"' in
              generate_latest().decode(), torch.cuda.is_initialized())
    """
    found = run_python(code)
    assert (found.returncode, found.stdout) == (0, "True True False\n"), found.stderr


# ---- OpenTelemetry ---------------------------------------------------------------------------------------------------


@pytest.fixture
def reader():
    """A reader and a provider of the real SDK."""
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    from opentelemetry.sdk.metrics import MeterProvider

    reader = export.InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    yield reader, provider
    provider.shutdown()


def read(reader):
    """{instrument: {attributes: value}}, and the meter's scope."""
    found, scopes = {}, set()
    for resource in reader.get_metrics_data().resource_metrics:
        for scope in resource.scope_metrics:
            scopes.add((scope.scope.name, scope.scope.version))
            for metric in scope.metrics:
                for point in metric.data.data_points:
                    key = tuple(sorted(point.attributes.items()))
                    assert key not in found.setdefault(metric.name, {})
                    found[metric.name][key] = point.value
    return found, scopes


def attributes(**named):
    return tuple(sorted(named.items()))


def test_an_opentelemetry_reader_says_what_stats_say(counted, reader):
    reader, provider = reader
    prequal.metrics.opentelemetry(provider)
    found, scopes = read(reader)
    wanted = {
        attributes(op=op, device=device, path=path, reason=reason): count
        for (op, device, path, reason), count in as_counters(prequal.stats()).items()
    }
    assert found["prequal.calls"] == wanted
    assert len(wanted) == len(WANTED)
    assert found["prequal.path_open"] == {attributes(op=o, device=d): value for (o, d), value in OPEN.items()}
    assert scopes == {("prequal", "1.2.3")}

    prequal.rms_norm(X)
    state.telemetry.reset()
    again, _ = read(reader)
    key = attributes(op="rms_norm", device="cuda:0", path="fast", reason="")
    assert again["prequal.calls"] == wanted | {key: 6}


def test_the_counter_is_a_monotonic_sum(counted, reader):
    reader, provider = reader
    prequal.metrics.opentelemetry(provider)
    (resource,) = reader.get_metrics_data().resource_metrics
    metric = next(m for m in resource.scope_metrics[0].metrics if m.name == "prequal.calls")
    assert metric.data.is_monotonic
    assert metric.unit == "{call}"


def test_asking_twice_for_one_provider_counts_once_and_without_a_warning(counted, reader, caplog, monkeypatch):
    """Whether or not the SDK finds a second set of instruments by itself."""
    reader, provider = reader
    meter = prequal.metrics.opentelemetry(provider)
    monkeypatch.setattr(provider, "get_meter", lambda *args: pytest.fail("asked for a second meter"))
    assert prequal.metrics.opentelemetry(provider) is meter
    found, _ = read(reader)  # asserts that no attributes come twice
    assert [record.getMessage() for record in caplog.records if record.name.startswith("opentelemetry")] == []
    assert sum(found["prequal.calls"].values()) == sum(WANTED.values())


def test_the_default_provider_is_the_global_one():
    """Asked for before the application sets its provider, as a library is imported."""
    pytest.importorskip("opentelemetry.sdk")
    code = """if True:
        import torch, prequal
        prequal.metrics.opentelemetry()
        from opentelemetry import metrics
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        reader = InMemoryMetricReader()
        metrics.set_meter_provider(MeterProvider(metric_readers=[reader]))
        for _ in range(3):
            prequal.rms_norm(torch.ones(2, 4))
        (resource,) = reader.get_metrics_data().resource_metrics
        found = {m.name: [p.value for p in m.data.data_points] for m in resource.scope_metrics[0].metrics}
        print(found)
    """
    found = run_python(code)
    assert (found.returncode, found.stdout) == (0, "{'prequal.calls': [3], 'prequal.path_open': [0]}\n"), found.stderr


# ---- without the clients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "module", "extra"),
    [("prometheus", "prometheus_client", "prometheus"), ("opentelemetry", "opentelemetry", "otel")],
)
def test_without_its_client_an_exporter_says_what_to_install(function, module, extra):
    code = f"""if True:
        import sys
        sys.modules["{module}"] = None  # an import of it fails, as where it is not installed
        import prequal
        try:
            prequal.metrics.{function}()
        except ImportError as error:
            print(error)
    """
    found = run_python(code)
    assert found.stdout == f"{module} is not installed: pip install 'prequal[{extra}]'\n", found.stderr


def test_importing_prequal_imports_no_client():
    code = "import sys, prequal; print({'prometheus_client', 'opentelemetry'} & set(sys.modules))"
    assert run_python(code).stdout == "set()\n"
    code = "import sys; from prequal import metrics; print({'prometheus_client', 'opentelemetry'} & set(sys.modules))"
    assert run_python(code).stdout == "set()\n"
