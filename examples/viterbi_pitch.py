"""The pitch of a sung voice, followed as pYIN does it: candidates of every frame, and the likeliest path through them.

    python examples/viterbi_pitch.py --json pitch.json --plot pitch.png
    python examples/viterbi_pitch.py --quick --device cpu     # a rehearsal: two short voices, coarse bins

The voices are made here, so their pitch is known: harmonics under formants, with vibrato and glides, pauses between
notes, and breath all the time. Each frame's normalised difference function has troughs, and a prior of thresholds
(Beta(2, 18)) makes them probabilities of pitch bins, as Mauch and Dixon wrote (pYIN, 2014). States are a bin voiced and
the same bin unvoiced, side by side, so that a move from frame to frame lies within a band; `prequal.viterbi_decode`
takes all voices in one call, each of its own length.

Right first: the path must be that of the reference, its score as good as that of librosa's own Viterbi on the same
probabilities where librosa is installed; who is wrong is not timed. librosa's whole pYIN is told beside, and what the
best candidate of every frame alone would be.

Exit codes: 0 done; 1 a wrong answer; 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.program import a_file, add_device, device_named, fill_numbers, who_answers
from prequal.bench.stats import Spread

LOG_FLOOR = math.log(torch.finfo(torch.float32).tiny)  # of a state that no candidate speaks for; librosa does alike
UNSURE = 0.01  # the share of a threshold that no trough lies below, for the deepest
SWITCH = 0.01  # from voiced to unvoiced or back, a frame
OCTAVES_A_SECOND = 35.92  # the fastest glide, pYIN's default in librosa
HALF_A_SEMITONE = 0.5 / 12  # octaves: nearer to the truth is right, as the field counts

_start = time.perf_counter()


def progress(text: str) -> None:
    print(f"[{time.perf_counter() - _start:6.1f} s] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Grid:
    """Frames in time, bins in pitch."""

    rate: int = 22_050  # Hz
    frame: int = 2048  # samples, of which half are a window and half the largest lag
    hop: int = 256
    lowest: float = 65.41  # Hz, C2
    octaves: int = 4
    fineness: int = 10  # bins a semitone

    @property
    def bins(self) -> int:
        return 12 * self.fineness * self.octaves + 1

    @property
    def states(self) -> int:
        return 2 * self.bins

    @property
    def reach(self) -> int:
        """Bins that a pitch may move from frame to frame."""
        return round(OCTAVES_A_SECOND * 12 * self.hop / self.rate) * self.fineness // 2

    @property
    def lags(self) -> tuple[int, int]:
        """From the highest pitch's period to the lowest's, in samples; both ends are candidates."""
        return max(int(self.rate / (self.lowest * 2**self.octaves)), 2), int(self.rate / self.lowest) + 1

    def pitch_of(self, bins: Tensor) -> Tensor:
        """Hz."""
        return self.lowest * 2.0 ** (bins.double() / (12 * self.fineness))


FULL = Grid()
COARSE = Grid(rate=8_000, frame=512, hop=128, lowest=82.41, octaves=3, fineness=4)


# ---- voices ----------------------------------------------------------------------------------------------------------

FORMANTS = ((700, 110), (1220, 120), (2600, 160))  # Hz and width: an open vowel
BREATH = 0.08  # of noise, beside a voice of peak 1


def voice(grid: Grid, seconds: float, number: int) -> tuple[Tensor, Tensor]:
    """[N] samples of a voice, and [N] its pitch in Hz, 0 where it has none."""
    generator = torch.Generator().manual_seed(number)
    count = int(seconds * grid.rate)
    at = torch.arange(count, dtype=torch.float64) / grid.rate
    base = grid.lowest * 2 ** (grid.octaves * (0.25 + 0.45 * float(torch.rand((), generator=generator))))
    pitch, loud = torch.zeros_like(at), torch.zeros_like(at)
    begin, note = 0.1, 0.0
    while begin < seconds - 0.2:
        end = min(begin + 0.3 + 0.6 * float(torch.rand((), generator=generator)), seconds - 0.1)
        before, note = note, float(torch.randint(-5, 6, (), generator=generator))
        inside = (at >= begin) & (at < end)
        since = at[inside] - begin
        glide = note + (before - note) * torch.exp(-since / 0.04)
        vibrato = 0.3 * torch.sin(2 * math.pi * 5.5 * since) * (since / 0.3).clamp(max=1)
        pitch[inside] = base * 2 ** ((glide + vibrato) / 12)
        loud[inside] = (since / 0.02).clamp(max=1) * ((end - begin - since) / 0.03).clamp(max=1)
        if torch.rand((), generator=generator) < 0.4:  # else the next note follows without a pause
            end += 0.15
        begin = end
    phase = 2 * math.pi * torch.cumsum(pitch / grid.rate, 0)
    sound = torch.zeros_like(at)
    for harmonic in range(1, int(grid.rate / 2 / base) + 1):
        hz = harmonic * pitch
        size = sum(1 / (1 + ((hz - centre) / width) ** 2) for centre, width in FORMANTS) + 0.05
        sound += torch.where(hz < 0.45 * grid.rate, size / harmonic, 0.0) * torch.sin(harmonic * phase)
    noise = torch.randn(count, generator=generator, dtype=torch.float64)
    sound = loud * sound / sound.abs().max() + BREATH * noise
    return sound.float(), pitch


@dataclass(frozen=True)
class Voices:
    sound: Tensor  # [B, N], padded with zeros
    pitch: Tensor  # [B, T] of float64 in Hz, the truth at the middle of each frame; 0 where there is none
    lengths: Tensor  # [B] of int64, frames


def frames_of(sound: Tensor, grid: Grid) -> Tensor:
    """[B, N] to [B, T, frame], each around its time."""
    return torch.nn.functional.pad(sound, (grid.frame // 2, grid.frame // 2)).unfold(1, grid.frame, grid.hop)


def voices_of(grid: Grid, count: int, seconds: float, device: torch.device) -> Voices:
    """The first is the longest; the others end earlier."""
    made = [voice(grid, seconds * (1 - 0.5 * b / count), b) for b in range(count)]
    sound, pitch = (torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in zip(*made, strict=True))
    lengths = torch.tensor([len(part) // grid.hop + 1 for part, _ in made])
    most = int(lengths.max())
    at = (torch.arange(most) * grid.hop).clamp(max=pitch.shape[1] - 1)
    return Voices(sound.to(device), pitch[:, at].to(device), lengths.to(device))


# ---- probabilities of a frame ----------------------------------------------------------------------------------------


def differences(frames: Tensor, grid: Grid) -> Tensor:
    """[B, T, frame] to the cumulative-mean-normalised difference at lags 0 to the longest and one more: YIN's d'."""
    window, last = grid.frame // 2, grid.lags[1] + 1
    x = frames.double()
    spectrum = torch.fft.rfft(x, 2 * grid.frame)
    start = torch.fft.rfft(x[..., :window], 2 * grid.frame)
    products = torch.fft.irfft(spectrum * start.conj(), 2 * grid.frame)[..., : last + 1]
    energy = torch.nn.functional.pad(x.square().cumsum(-1), (1, 0))
    lag = torch.arange(last + 1, device=x.device)
    moved = energy[..., lag + window] - energy[..., lag]
    difference = (energy[..., window : window + 1] + moved - 2 * products).clamp(min=0)
    mean = difference[..., 1:].cumsum(-1) / lag[1:]
    tiny = torch.finfo(torch.float64).tiny
    return torch.nn.functional.pad(difference[..., 1:] / mean.clamp(min=tiny), (1, 0), value=1.0)


def share_below(x: Tensor) -> Tensor:
    """The distribution function of Beta(2, 18), the prior of the threshold; its mean is 0.1."""
    x = x.clamp(0, 1)
    return 1 - (1 - x) ** 18 * (1 + 18 * x)


def candidates(frames: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """[B, T, L] probabilities of lags, and [B, T, L] the lags, between samples.

    A threshold takes the first trough below it. So a trough has the thresholds between its own depth and that of the
    deepest before it, all of them at once, in closed form.
    """
    first, last = grid.lags
    normal = differences(frames, grid)
    left, here, right = (normal[..., first + i : last + 1 + i] for i in (-1, 0, 1))
    trough = (here < left) & (here <= right)
    depth = torch.where(trough, here, 1.0)
    deepest = depth.cummin(-1).values
    before = torch.nn.functional.pad(deepest[..., :-1], (1, 0), value=1.0)
    share = (share_below(before) - share_below(depth)).clamp(min=0)
    least, place = depth.min(-1, keepdim=True)
    share = share.scatter_add(-1, place, UNSURE * share_below(least))
    bend = left - 2 * here + right
    shift = torch.where(trough & (bend > 0), 0.5 * (left - right) / bend.clamp(min=1e-30), 0.0)
    return torch.where(trough, share, 0.0), torch.arange(first, last + 1, device=frames.device) + shift.clamp(-1, 1)


def emissions_of(frames: Tensor, grid: Grid) -> Tensor:
    """[B, T, frame] to log-probabilities [B, T, S]: states 2 i and 2 i + 1 are bin i, voiced and not."""
    share, lag = candidates(frames, grid)
    bins = (12 * grid.fineness * torch.log2(grid.rate / lag / grid.lowest)).round().long().clamp(0, grid.bins - 1)
    voiced = share.new_zeros((*share.shape[:2], grid.bins)).scatter_add(-1, bins, share)
    unvoiced = ((1 - voiced.sum(-1, keepdim=True)).clamp(min=0) / grid.bins).expand_as(voiced)
    both = torch.stack((voiced, unvoiced), -1).flatten(-2)
    return both.log().clamp(min=LOG_FLOOR).float()


def moves_of(grid: Grid, device: torch.device) -> Tensor:
    """[S, S] log-probabilities: a triangle of pitch bins times a switch of voicing; -inf outside `band_of` them."""
    place = torch.arange(grid.bins, device=device)
    near = (grid.reach + 1 - (place[:, None] - place).abs()).clamp(min=0).double()
    near = near / near.sum(1, keepdim=True)
    switch = torch.tensor([[1 - SWITCH, SWITCH], [SWITCH, 1 - SWITCH]], dtype=torch.float64, device=device)
    return torch.kron(near, switch).log().float()


def band_of(grid: Grid) -> int:
    return 2 * grid.reach + 1


def start_of(grid: Grid, device: torch.device) -> Tensor:
    """[S]: unvoiced, at any bin."""
    start = torch.full((grid.bins, 2), -torch.inf, device=device)
    start[:, 1] = -math.log(grid.bins)
    return start.flatten()


@dataclass(frozen=True)
class Model:
    emissions: Tensor  # [B, T, S]
    moves: Tensor  # [S, S]
    start: Tensor  # [S]
    lengths: Tensor  # [B]
    band: int

    def prequal(self) -> tuple[Tensor, Tensor]:
        return prequal.viterbi_decode(self.emissions, self.moves, self.start, lengths=self.lengths, band=self.band)

    def torch(self) -> tuple[Tensor, Tensor]:
        """The reference: a few launches a step."""
        function = prequal.viterbi_decode.op.reference
        return function(self.emissions, self.moves, self.start, lengths=self.lengths, band=self.band)

    def librosa(self) -> tuple[Tensor, None]:
        """Its Viterbi, voice by voice on the CPU, from probabilities. It takes none for a tiny one."""
        from librosa import sequence

        paths = torch.full(self.emissions.shape[:2], -1)
        moves, start = (value.double().exp().cpu() for value in (self.moves, self.start))
        # a sum in float64, as it is checked there
        moves, start = (moves / moves.sum(1, keepdim=True)).numpy(), (start / start.sum()).numpy()
        for b, length in enumerate(self.lengths.tolist()):
            frames = self.emissions[b, :length].double().exp().cpu().T.numpy()
            paths[b, :length] = torch.from_numpy(sequence.viterbi(frames, moves, p_init=start).astype("int64"))
        return paths.to(self.emissions.device), None

    def frame_by_frame(self) -> Tensor:
        """[B, T]: the likeliest state of each frame, of which a bin's unvoiced state is all of them together."""
        x = self.emissions.double()
        whole = x[..., 1::2].logsumexp(-1, keepdim=True)
        best, place = x[..., 0::2].max(-1, keepdim=True)
        return (2 * place + (whole > best)).squeeze(-1)

    def score_of(self, paths: Tensor) -> Tensor:
        """[B] of float64: what paths score."""
        inside = paths >= 0
        at = paths.clamp(min=0)
        x = self.emissions.double().gather(2, at.unsqueeze(2)).squeeze(2)
        moved = self.moves.double()[at[:, :-1], at[:, 1:]]
        score = torch.where(inside, x, 0.0).sum(1) + torch.where(inside[:, 1:], moved, 0.0).sum(1)
        return score + self.start.double()[at[:, 0]]


DECODERS = {"prequal": "prequal", "torch": "torch, a loop of steps", "librosa": "librosa's Viterbi, on the CPU"}


# ---- right first -----------------------------------------------------------------------------------------------------


def limit_of(steps: int, best: Tensor) -> float:
    """Two roundings in float32 a step, each of half a last bit of a sum that is no larger than the score, as every term
    is negative. One path may come out so much too high, and the better one so much too low."""
    return 2 * (2 * steps * torch.finfo(torch.float32).eps / 2 * float(best.abs().max()))


def compared(model: Model, answers: Mapping[str, tuple[Tensor, Any]]) -> dict[str, dict[str, Any]]:
    """Whose path scores less than another's, beyond roundings; prequal and torch must be equal."""
    scores = {name: model.score_of(paths) for name, (paths, _) in answers.items()}
    best, found = torch.stack(list(scores.values())).amax(0), {}
    limit = limit_of(model.emissions.shape[1], best)
    for name, (paths, said) in answers.items():
        behind = (best - scores[name]).tolist()
        # written so that a NaN is wrong
        wrong = [
            f"voice {b}: {value:.3g} behind, limit {limit:.3g}" for b, value in enumerate(behind) if not value <= limit
        ]
        if name == "prequal":
            differ = (paths != answers["torch"][0]).any(1) | (said != answers["torch"][1])
            places = differ.nonzero().flatten().tolist()
            wrong += [f"voice {b}: another path or score than the reference has" for b in places]
        found[name] = {"behind": max(behind), "wrong": wrong}
    return found


# ---- how well it hears -----------------------------------------------------------------------------------------------


def heard(pitch: Tensor, voiced: Tensor, voices: Voices) -> dict[str, float]:
    """[B, T] in Hz and bool. Of frames with a voice: right pitch, an octave off, found; of others: taken for voice."""
    inside = torch.arange(pitch.shape[1], device=pitch.device) < voices.lengths[:, None]
    truth = (voices.pitch > 0) & inside
    silent = ~truth & inside
    off = (torch.log2(pitch.clamp(min=1)) - torch.log2(voices.pitch.clamp(min=1))).abs()

    def share(part: Tensor, whole: Tensor) -> float:
        return float((part & whole).sum() / whole.sum())

    return {
        "right_pitch": share(voiced & (off < HALF_A_SEMITONE), truth),
        "octave_off": share(voiced & (off > 1 - HALF_A_SEMITONE), truth),
        "voice_found": share(voiced, truth),
        "false_voice": share(voiced, silent),
    }


def of_states(paths: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Hz, and whether voiced."""
    return grid.pitch_of(paths.clamp(min=0) // 2), (paths >= 0) & (paths % 2 == 0)


def librosa_pyin(voices: Voices, grid: Grid) -> tuple[Tensor, Tensor]:
    """All of librosa's own, voice by voice."""
    import librosa

    pitch = torch.zeros_like(voices.pitch)
    voiced = torch.zeros_like(pitch, dtype=torch.bool)
    for b, length in enumerate(voices.lengths.tolist()):
        sound = voices.sound[b, : (length - 1) * grid.hop + 1].cpu().numpy()
        hz, flag, _ = librosa.pyin(
            sound,
            sr=grid.rate,
            fmin=grid.lowest,
            fmax=grid.lowest * 2**grid.octaves,
            frame_length=grid.frame,
            hop_length=grid.hop,
            resolution=1 / grid.fineness,
        )
        count = min(len(hz), length)
        pitch[b, :count] = torch.from_numpy(hz[:count]).nan_to_num().to(pitch)
        voiced[b, :count] = torch.from_numpy(flag[:count]).to(voiced.device)
    return pitch, voiced


def why_no_librosa() -> str | None:
    try:
        import librosa
        import librosa.sequence
    except ImportError as error:
        return f"librosa is not installed ({error})"
    return None if hasattr(librosa, "pyin") else f"this librosa ({librosa.__version__}) has no pyin"


# ---- then times ------------------------------------------------------------------------------------------------------


def timed(device: Any, name: str, call: Callable[[], Any], runs: int) -> dict[str, Any]:
    """The loop and librosa take as long as all the rest: a run or two of them."""
    runs = runs if name == "prequal" else min(runs, 2)
    call()
    if name == "librosa":
        return {"wall_us": Spread.of(device.wall_us(call, runs)).json()}
    return {key: Spread.of(getattr(device, key)(call, runs)).json() for key in ("device_us", "wall_us")}


# ---- telling ---------------------------------------------------------------------------------------------------------

LISTENERS = {"prequal": "the path", "frames": "each frame alone", "pyin": "librosa.pyin"}


def hearing_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    lines = [f"{'frames, %':<24}{'right pitch':>13}{'octave off':>12}{'voice found':>13}{'false voice':>13}"]
    for name, row in rows.items():
        cells = [100 * row[key] for key in ("right_pitch", "octave_off", "voice_found", "false_voice")]
        lines.append(f"  {LISTENERS[name]:<22}{cells[0]:>13.1f}{cells[1]:>12.1f}{cells[2]:>13.1f}{cells[3]:>13.1f}")
    return "\n".join(lines)


def time_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"{'decoding all voices':<32}{'device ms':>11}{'quartiles':>20}{'whole call':>12}"]
    for name, row in rows.items():
        on_device = row.get("device_us")
        cells = ("–", "–")
        if on_device:
            quartiles = f"{on_device['q1'] / 1e3:.3f}–{on_device['q3'] / 1e3:.3f}"
            cells = (f"{on_device['median'] / 1e3:.3f}", quartiles)
        lines.append(f"  {DECODERS[name]:<30}{cells[0]:>11}{cells[1]:>20}{row['wall_us']['median'] / 1e3:>12.3f}")
    return "\n".join(lines)


def plot(path: pathlib.Path, title: str, model: Model, voices: Voices, paths: Tensor, grid: Grid) -> None:
    """The first voice: what its frames say, what each alone would take, the path, and the truth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    length = int(voices.lengths[0])
    sound, at = voices.sound[0].cpu().numpy(), (torch.arange(length) * grid.hop / grid.rate).numpy()
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(11, 6), sharex=True, layout="constrained", height_ratios=(1, 3)
    )
    top.plot((torch.arange(len(sound)) / grid.rate).numpy(), sound, color="#999999", linewidth=0.3)
    top.set(ylabel="sound", yticks=[])
    voiced = model.emissions[0, :length, 0::2].float().exp().sqrt().T.cpu().numpy()
    times = (torch.arange(length + 1) - 0.5) * grid.hop / grid.rate
    pitches = grid.pitch_of(torch.arange(grid.bins + 1) - 0.5)
    image = bottom.pcolormesh(times.numpy(), pitches.numpy(), voiced, cmap="Greys", vmin=0, vmax=1, rasterized=True)
    figure.colorbar(image, ax=bottom, label="root of a bin's probability", shrink=0.8)

    def drawn(pitch: Tensor, there: Tensor) -> Any:
        return torch.where(there, pitch, torch.nan)[:length].cpu().numpy()

    truth = voices.pitch[0]
    alone, found = (of_states(p[0], grid) for p in (model.frame_by_frame(), paths))
    dots = {"color": "#E69F00", "linestyle": "none", "marker": ".", "markersize": 4}
    bottom.plot(at, drawn(truth, truth > 0), color="#009E73", linewidth=5, alpha=0.5, label="the truth")
    bottom.plot(at, drawn(*alone), label=LISTENERS["frames"], **dots)
    bottom.plot(at, drawn(*found), color="#0072B2", linewidth=1.5, label=LISTENERS["prequal"])
    bottom.set(xlabel="time, s", ylabel="pitch, Hz", yscale="log", ylim=(float(pitches[0]), float(pitches[-1])))
    bottom.set_yticks([100, 200, 400, 800], labels=["100", "200", "400", "800"])
    bottom.yaxis.set_minor_formatter("")
    bottom.legend(frameon=False, ncols=3, loc="upper right")
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


# ---- the program -----------------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_device(parser)
    parser.add_argument("--quick", action="store_true", help="two short voices, coarse bins, few runs")
    parser.add_argument("--voices", type=int, default=None, help="16; 2 with --quick")
    parser.add_argument("--seconds", type=float, default=None, help="of the longest voice: 10; 2 with --quick")
    parser.add_argument("--runs", type=int, default=None, help="20; 2 with --quick. Of the others 2 at most")
    parser.add_argument("--json", type=a_file, help="write all figures here")
    parser.add_argument("--plot", type=a_file, help="write a PNG of the first voice here")
    args = parser.parse_args(argv)
    fill_numbers(parser, args, {"voices": (16, 2), "seconds": (10.0, 2.0), "runs": (20, 2)})
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    device = device_named(args.device)
    where, grid = torch.device(args.device), COARSE if args.quick else FULL
    progress(f"making {args.voices} voices")
    voices = voices_of(grid, args.voices, args.seconds, where)
    # a voice at a time: a frame has as many differences as lags, in float64
    parts = [emissions_of(frames_of(one[None], grid), grid) for one in voices.sound]
    emissions = torch.cat(parts)[:, : voices.pitch.shape[1]].contiguous()
    model = Model(emissions, moves_of(grid, where), start_of(grid, where), voices.lengths, band_of(grid))
    batch, steps, states = emissions.shape
    title = f"pitch of {batch} voices, {steps} frames, {states} states, a band of {model.band}, {device.name}"
    print(title)
    result: dict[str, Any] = {
        "schema": 1,
        "title": title,
        "device": device.name,
        "shape": {"voices": batch, "frames": steps, "states": states, "band": model.band},
        "arguments": {name: value for name, value in vars(args).items() if name not in ("json", "plot")},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "prequal": prequal.__version__},
        "absent": {},
    }

    calls: dict[str, Callable[[], Any]] = {"prequal": model.prequal, "torch": model.torch}
    if (reason := why_no_librosa()) is None:
        calls["librosa"] = model.librosa
    else:
        result["absent"]["librosa"] = reason
        print(f"librosa: left out: {reason}")
    answers = {}
    for name, call in calls.items():
        progress(f"decoding by {name}")
        answers[name] = call()
    result["answers"] = compared(model, answers)
    print("\nscore of a voice's path, behind the best of these at most:")
    failed = []
    for name, row in result["answers"].items():
        print(f"  {DECODERS[name]:<30} {row['behind']:.2e}")
        for wrong in row["wrong"]:
            print(f"    WRONG {wrong}")
        failed += [name] if row["wrong"] else []

    paths = answers["prequal"][0]
    result["heard"] = {"prequal": heard(*of_states(paths, grid), voices)}
    result["heard"]["frames"] = heard(*of_states(model.frame_by_frame(), grid), voices)
    if "librosa" in calls:
        progress("listening by librosa.pyin")
        result["heard"]["pyin"] = heard(*librosa_pyin(voices, grid), voices)
    print(f"\n{hearing_table(result['heard'])}")

    right = [name for name in calls if name not in failed]
    result["times"] = {}
    for name in right:
        progress(f"timing {name}")
        result["times"][name] = timed(device, name, calls[name], args.runs)
    print(f"\n{time_table(result['times'])}")
    if "prequal" in right:
        result["path"] = who_answers(model.prequal)["viterbi_decode"]
        print(f"\nwho answers: viterbi_decode {result['path']}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        progress(f"wrote {args.json}")
    if args.plot:
        plot(args.plot, title, model, voices, paths, grid)
        progress(f"wrote {args.plot}")
    if failed:
        print(f"\nFAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
