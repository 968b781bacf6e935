import errno
import io
import json
import math
import os
from contextlib import contextmanager
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from collectives.job.system import replacing
from mpi_tests.helpers.trained import facts
from training.report import read
from training.reports.html import report as page_of
from training.reports.jsonl import JSONLines, draw_missing, loss_figure, smoothed
from training.reports.log import RunLog
from training.reports.metrics import Metrics, Validation, iteration_line, memory_mib
from training.reports.out_dir import take_out_dir
from training.reports.summary import summary
from training.settings.config import Config

EXAMPLE = Metrics(12, 300, 2.3456, 0.89, 9.99e-4, 12345, 34.5e9, None, 120, 12, 512)


def metrics(iter_num, loss):
    return EXAMPLE._replace(iter=iter_num, loss=loss)


def test_the_line_of_an_iteration():
    assert iteration_line(EXAMPLE) == (
        "iter 12/300 | loss 2.3456 | grad norm 0.89 | lr 9.99e-04 | 12.3k tok/s | 34.5 GFLOP/s | "
        "compute 120 ms | comm 12 ms | mem 512 MiB"
    )
    assert "34.5 GFLOP/s | MFU 41.3% | compute" in iteration_line(EXAMPLE._replace(mfu=0.4131))


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0, "0.0"), (999.9, "999.9"), (999.96, "1.0k"), (1e6, "1.0M"), (5.5e14, "550.0T"), (2e19, "20000.0P")],
)
def test_rates_get_a_prefix(rate, text):
    assert f"| {text} tok/s |" in iteration_line(EXAMPLE._replace(tokens_per_s=rate))


@contextmanager
def log_in(folder, progress=False, first=1):
    """Open the log of a run that writes to a folder, or nothing."""
    sinks = [JSONLines(str(folder))] if folder else []
    with RunLog(facts(max_iters=300, vocab_size=64, first=first), sinks, progress) as log:
        log.open()
        yield log


def run(folder, progress=False, first=1):
    with log_in(folder, progress, first) as log:
        log.step(metrics(1, 4.0))
        log.step(metrics(2, 3.0))
        log.validation(2, Validation(3.5))


def test_records_and_lines(tmp_path, capsys):
    run(tmp_path)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records == [metrics(1, 4.0)._asdict(), metrics(2, 3.0)._asdict(), {"iter": 2, "val_loss": 3.5}]
    lines = [iteration_line(metrics(1, 4.0)), iteration_line(metrics(2, 3.0)), "iter 2/300 | val loss 3.5000"]
    assert capsys.readouterr().out.splitlines() == lines
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_several_validation_files_have_losses_and_perplexities(tmp_path, capsys):
    validation = Validation(math.log(8), {"a.txt": math.log(4), "b.txt": 1000.0})
    with log_in(tmp_path) as log:
        log.validation(2, validation)
    record = {
        "iter": 2,
        "val_loss": math.log(8),
        "val_perplexity": pytest.approx(8),
        "val_loss/a.txt": math.log(4),
        "val_loss/b.txt": 1000.0,
        "val_perplexity/a.txt": pytest.approx(4),
        "val_perplexity/b.txt": math.inf,
    }
    assert read(tmp_path) == [record]
    assert capsys.readouterr().out.splitlines() == [
        "iter 2/300 | val loss 2.0794 | perplexity 8.00",
        "iter 2/300 | val loss of a.txt 1.3863 | perplexity 4.00",
        "iter 2/300 | val loss of b.txt 1000.0000 | perplexity inf",
    ]


def timed(iter_num, loss, seconds, mfu):
    """Return the record of a step of 1,000 tokens."""
    times = {"compute_ms": 750 * seconds, "comm_ms": 250 * seconds, "memory_mib": 100.0 + iter_num}
    return metrics(iter_num, loss)._replace(tokens_per_s=1000 / seconds, mfu=mfu, **times)._asdict()


STEPS = [timed(1, 4.0, 9.0, 0.01), timed(2, 3.0, 1.0, 0.3), timed(3, 2.5, 3.0, 0.1)]
VALIDATIONS = [{"iter": 2, "val_loss": 3.5}, {"iter": 3, "val_loss": 3.75}, {"iter": 3, "val_loss": math.nan}]


def test_a_summary_has_means_over_time_without_the_first_step():
    """2,000 tokens in 4 s, in which 0.3 x 1 s + 0.1 x 3 s of the peak are reached."""
    assert summary([*STEPS, *VALIDATIONS], wall_s=20.04) == {
        "final loss": "2.5000 at step 3",
        "best validation loss": "3.5000 at step 2",
        "tokens": "3,000",
        "wall time": "20.0 s",
        "speed": "500.0 tok/s",
        "MFU": "15.0%",
        "peak memory": "103 MiB",
    }


def test_a_summary_of_one_step_and_of_none():
    alone = summary(STEPS[:1])
    assert (alone["speed"], alone["MFU"]) == ("111.1 tok/s", "1.0%")
    assert "best validation loss" not in alone
    assert summary(VALIDATIONS) == {}


def test_the_log_ends_with_the_summary(capsys):
    with log_in(None) as log:
        log.summarize()
        for step in STEPS:
            log.step(Metrics(**step))
        log.summarize()
    last = capsys.readouterr().out.splitlines()[3:]
    assert len(last) == 1
    assert last[0].startswith("summary: final loss 2.5000 at step 3, tokens 3,000, wall time ")


def strictly(line):
    """Parse a line as a reader does that knows only JSON."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_null_and_a_word(tmp_path):
    """Our readers restore them: the figure, also of a run that was killed, and the report."""
    spoilt = metrics(2, math.nan)._replace(grad_norm=math.inf, lr=-math.inf)
    with log_in(tmp_path) as log:
        log.step(metrics(1, 4.0))
        log.step(spoilt)
        log.validation(2, Validation(math.nan))
    first, second, third = map(strictly, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "not_finite" not in first
    assert [second[name] for name in ("loss", "grad_norm", "lr", "iter")] == [None, None, None, 2]
    assert second["not_finite"] == {"loss": "NaN", "grad_norm": "Infinity", "lr": "-Infinity"}
    assert third == {"iter": 2, "val_loss": None, "not_finite": {"val_loss": "NaN"}}
    (tmp_path / "loss.png").unlink()
    draw_missing(str(tmp_path))
    assert (tmp_path / "loss.png").exists()
    records = read(tmp_path)
    assert repr(records[1]) == repr(spoilt._asdict())
    assert 'id="records"' in page_of({"run": records})


def test_a_record_is_in_the_file_at_once(tmp_path):
    with log_in(tmp_path) as log:
        log.step(metrics(1, 4.0))
        assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 4.0


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(None)
    assert list(tmp_path.iterdir()) == []
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_terminal_gets_a_progress_bar_below_the_lines(capsys):
    run(None, progress=True)
    out, err = capsys.readouterr()
    assert iteration_line(metrics(2, 3.0)) in out
    assert "0/300" in out
    assert "2/300 [" in out
    assert err == ""


def test_an_error_still_draws_the_loss(tmp_path):
    def broken_run():
        with log_in(tmp_path) as log:
            log.step(metrics(1, 4.0))
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        broken_run()
    assert matplotlib.image.imread(tmp_path / "loss.png").shape[2] == 4


def full(*arguments, **more):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_said_once_and_the_run_goes_on(tmp_path, capsys, monkeypatch):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")

    monkeypatch.setattr(Figure, "savefig", full)
    run(tmp_path, first=3)
    lines = [line for line in capsys.readouterr().out.splitlines() if "written" in line]
    reason = "can't be written (No space left on device): the run continues without it"
    assert lines == [f"{tmp_path}/metrics.jsonl {reason}", f"{tmp_path}/loss.png {reason}"]


def test_a_new_run_starts_a_new_record(tmp_path):
    run(tmp_path)
    run(tmp_path)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_resumed_run_adds_to_the_record(tmp_path):
    run(tmp_path)
    run(tmp_path, first=3)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6


def test_the_figure_shows_the_records():
    records = [{"iter": 1, "loss": 4.0}, {"iter": 2, "loss": 3.0}, {"iter": 2, "val_loss": 3.5}]
    (axes,) = loss_figure(records, vocab_size=64).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("iteration", "loss (nats per token)")
    faint, smooth, val, uniform = axes.lines
    np.testing.assert_allclose(faint.get_xydata(), [(1, 4), (2, 3)])
    np.testing.assert_allclose(smooth.get_xydata(), [(1, 4), (2, 3)])
    np.testing.assert_allclose(val.get_xydata(), [(2, 3.5)])
    np.testing.assert_allclose(uniform.get_ydata(), math.log(64))
    assert uniform.get_linestyle() == "--"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["training, smoothed", "validation", "uniform guess over 64"]


def test_smoothing_does_not_lag():
    ramp = np.linspace(5, 1, 200)
    np.testing.assert_allclose(smoothed(ramp.tolist()), ramp)
    spike = [0.0] * 60 + [3.0] + [0.0] * 59
    np.testing.assert_allclose(smoothed(spike), [0.0] * 57 + [3 / 7] * 7 + [0.0] * 56, atol=1e-15)


def test_a_run_without_records_can_be_drawn():
    file = io.BytesIO()
    loss_figure([], vocab_size=64).savefig(file, format="png")
    assert file.getvalue().startswith(b"\x89PNG")


def test_replacing_is_all_or_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def half_write():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        half_write()
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "old"
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_peak_memory_is_what_the_kernel_shows():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = int(status["VmHWM"].removesuffix("kB"))
    # getrusage also counts the parent's memory at the start of this process.
    assert 0.95 * kib / 1024 <= memory_mib("cpu") <= 20 * kib / 1024


def killed_run(folder):
    """Leave the files of a run that was killed while it wrote a line."""
    folder.mkdir()
    lines = ['{"iter": 1, "loss": 4.0}', '{"iter": 1, "val_loss": 3.5}', "null", '{"iter": 2, "val_l']
    (folder / "metrics.jsonl").write_text("\n".join(lines))


def test_the_next_start_draws_what_killed_runs_could_not(tmp_path):
    """A picture that is newer than its metrics stays; one of the run that was resumed and then killed does not."""
    for name in ("out", "out-2", "out-3", "out-4"):
        killed_run(tmp_path / name)
    for name, after_s in (("out-2", 10), ("out-3", -10)):
        (tmp_path / name / "loss.png").write_text("old")
        written_s = (tmp_path / name / "metrics.jsonl").stat().st_mtime + after_s
        os.utime(tmp_path / name / "loss.png", (written_s, written_s))
    (tmp_path / "out" / "config.toml").write_text("vocab_size = 64")
    (tmp_path / "out-4" / "config.toml").write_text("vocab_size =")
    assert take_out_dir(Config(out_dir=str(tmp_path / "out"))) == str(tmp_path / "out-5")
    begins = [(tmp_path / name / "loss.png").read_bytes()[:3] for name in ("out", "out-2", "out-3", "out-4")]
    assert begins == [b"\x89PN", b"old", b"\x89PN", b"\x89PN"]


def test_a_picture_that_cannot_be_drawn_stops_no_start(tmp_path, monkeypatch):
    killed_run(tmp_path / "out")
    monkeypatch.setattr(Figure, "savefig", full)
    assert take_out_dir(Config(out_dir=str(tmp_path / "out"))) == str(tmp_path / "out-2")
