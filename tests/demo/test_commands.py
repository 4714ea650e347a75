"""The command lines: what they refuse, in which words and with which exit code, what they leave.

Mutants run, each noticed: a digest not kept, or not looked at by a run or an export, or asked of a
state that has none; partial names left out, left behind or not named in errors; each refusal of a
file's content left out; only the seed of a recipe compared; a loss or weights not looked at; 0
after a signal, 143 at the end; handlers left in place; unfinished states taken, or taken without a
word; flags not checked; the folder not locked; a taken directory or another recipe as a failure;
plain means.
"""

from __future__ import annotations

import os
import re
import resource
import signal

import pytest
import torch
from tokenizers import Tokenizer

from demo import ablations, baselines, cli, export, files, state, train
from demo.attention import Selection

TRAIN = ("--tokens", "512", "--eager", "--threads", "1")


@pytest.fixture
def begun(folder):
    """A finished run of two steps."""
    assert cli.run(train.main, [str(folder), *TRAIN]) == 0
    return folder


@pytest.fixture
def refused(capsys):
    """Runs a command; its one sentence on stderr."""

    def check(code, command, *words):
        capsys.readouterr()
        assert cli.run(command, [str(word) for word in words]) == code
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        return err.strip()

    return check


def stop_after(monkeypatch, number):
    """Make every run get a signal in its first step."""
    step = train.Run.train_step

    def stopped(run):
        values = step(run)
        os.kill(os.getpid(), number)
        return values

    monkeypatch.setattr(train.Run, "train_step", stopped)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--seed -1", "--seed is -1, expected an integer >= 0 (nearest: 0)"),
        ("--tokens 0", "--tokens is 0, expected an integer >= 1 (nearest: 1)"),
        ("--tokens -5", "--tokens is -5, expected an integer >= 1 (nearest: 1)"),
        ("--tokens many", "--tokens is many, expected an integer >= 1"),
        ("--lr nan", "--lr is nan, expected a number > 0"),
        ("--lr 0", "--lr is 0, expected a number > 0 (for example 0.004)"),
        ("--lr inf", "--lr is inf, expected a number > 0, below 2^40"),
        ("--matrix-lr nan", "--matrix-lr is nan, expected a number > 0"),
        ("--matrix-lr -1", "--matrix-lr is -1, expected a number > 0 (for example 0.02)"),
        ("--threads 0", "--threads is 0, expected an integer in [1, 1024] (nearest: 1)"),
        ("--threads -1", "--threads is -1, expected an integer in [1, 1024] (nearest: 1)"),
    ],
)
def test_a_flag_out_of_range(tmp_path, refused, words, sentence):
    assert refused(2, train.main, tmp_path / "new", *words.split()) == sentence
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--windows 0", "--windows is 0, expected an integer >= 1 (nearest: 1)"),
        ("--windows -1", "--windows is -1, expected an integer >= 1 (nearest: 1)"),
        ("--trials 0", "--trials is 0, expected an integer in [1, 1000] (nearest: 1)"),
        ("--threads 0", "--threads is 0, expected an integer in [1, 1024] (nearest: 1)"),
    ],
)
def test_a_flag_of_the_ablations_out_of_range(tmp_path, refused, words, sentence):
    assert refused(2, ablations.main, tmp_path, *words.split()) == sentence


def test_folders_that_are_none(tmp_path, refused):
    file = tmp_path / "file"
    file.write_text("x")
    sentence = f"FOLDER is {file}, expected a directory or a new name"
    assert refused(2, train.main, file) == sentence
    assert refused(2, baselines.main, file) == sentence
    for folder in (file, tmp_path / "missing"):
        sentence = f"FOLDER is {folder}, expected a directory of demo.train"
        assert refused(2, export.main, folder, tmp_path / "model") == sentence
        assert refused(2, ablations.main, folder) == sentence
        assert folder.exists() == (folder is file)
    sentence = f"FOLDER is {tmp_path}, expected a directory with a state.pt"
    assert refused(2, export.main, tmp_path, tmp_path / "model") == sentence
    assert refused(2, ablations.main, tmp_path) == sentence
    assert sorted(tmp_path.iterdir()) == [file]
    assert "cannot be opened or written" in refused(1, train.main, file / "below")


def test_baselines_leave_the_held_out_text(folder, capsys):
    held_out = folder / "held_out.txt"
    assert cli.run(baselines.main, [str(folder)]) == 0
    found = held_out.read_text()
    (heading, *verses), rest = found.rstrip("\n").split("\n"), (folder / "kjv.txt").read_text()
    assert len(verses) == 40
    assert f"{heading}\n" in rest
    assert f"of {len(found)} held-out characters" in capsys.readouterr().out


def test_no_text(folder, refused):
    (folder / "kjv.txt").write_text("")
    sentence = (
        f"{folder / 'kjv.txt'}: text is empty, expected chapters; removed, it is fetched again"
    )
    assert refused(1, train.main, folder, *TRAIN) == sentence
    assert refused(1, baselines.main, folder) == sentence


def test_a_text_too_short(folder, refused, monkeypatch):
    file = folder / "kjv.txt"
    whole = file.read_text()
    file.write_text(whole.partition("\nRuth 2\n")[0])
    sentence = f"{file}: text has 1 chapters, expected more than 1; removed, it is fetched again"
    assert refused(1, train.main, folder, *TRAIN) == sentence
    file.write_text(whole)
    monkeypatch.setattr(train, "STAGES", (train.Stage(1.0, 1, 1 << 20, Selection(sparse=False)),))
    sentence = refused(1, train.main, folder, *TRAIN)
    pattern = r".*/kjv\.txt has \d+ tokens to train on, expected more than 1048576"
    assert re.fullmatch(pattern, sentence)


@pytest.mark.parametrize("command", [train.main, export.main, ablations.main])
@pytest.mark.parametrize("name", ["kjv.txt", "tokenizer.json"])
def test_a_changed_file(begun, refused, command, name):
    file = begun / name
    was = files.digest(file.read_bytes())[:16]
    file.write_text(file.read_text() + "\n")
    now = files.digest(file.read_bytes())[:16]
    words = {train.main: TRAIN, export.main: [begun / "model"], ablations.main: []}[command]
    assert refused(1, command, begun, *words) == (
        f"{file} has sha256 {now}, expected {was} as in state.pt: put back the file that the run "
        "began with, or take another folder"
    )
    assert not (begun / "model").exists()


def test_a_state_without_digests_is_taken(begun):
    content = torch.load(begun / "state.pt", weights_only=True)
    assert content.pop("digests").keys() == {"kjv.txt", "tokenizer.json"}
    torch.save(content, begun / "state.pt")
    (begun / "kjv.txt").write_text((begun / "kjv.txt").read_text() + "\n")
    assert cli.run(export.main, [str(begun), str(begun / "model")]) == 0
    assert cli.run(train.main, [str(begun), *TRAIN]) == 0
    assert state.load(begun).digests["kjv.txt"] == files.digest((begun / "kjv.txt").read_bytes())


def test_a_tokenizer_that_went_is_made_again(begun):
    whole = (begun / "tokenizer.json").read_bytes()
    (begun / "tokenizer.json").unlink()
    assert cli.run(export.main, [str(begun), str(begun / "model")]) == 0
    assert (begun / "tokenizer.json").read_bytes() == whole


def test_a_broken_tokenizer(begun, refused):
    file = begun / "tokenizer.json"
    whole = file.read_text()
    file.write_text(whole[: len(whole) // 2])
    hint = "removed, it is trained again from the text"
    sentence = f"{file} cannot be read as a tokenizer; {hint}"
    # the run's digest is told apart only where a file can be read at all
    assert refused(1, train.main, begun, *TRAIN) == sentence
    assert refused(1, export.main, begun, begun / "model") == sentence
    (begun / "state.pt").unlink()
    assert refused(1, train.main, begun, *TRAIN) == sentence
    larger = Tokenizer.from_str(whole)
    larger.add_tokens(["Bethlehemjudah"])
    larger.save(str(file))
    assert refused(1, train.main, begun, *TRAIN) == f"{file} has 301 ids, expected 300; {hint}"


@pytest.mark.parametrize("size", [0, 100, 0.5, 0.999])
def test_a_broken_state(begun, refused, size):
    file = begun / "state.pt"
    whole = file.read_bytes()
    file.write_bytes(whole[: size if isinstance(size, int) else int(size * len(whole))])
    advice = "put a whole copy in its place, or remove it and train anew"
    sentence = f"{file} cannot be read as a training state: {advice}"
    assert refused(1, train.main, begun, *TRAIN) == sentence
    assert refused(1, export.main, begun, begun / "model") == sentence
    assert refused(1, ablations.main, begun) == sentence


def test_what_is_no_state(begun, refused):
    file = begun / "state.pt"
    content = torch.load(file, weights_only=True)
    for wrong, sentence in (
        ([1], "is no training state: "),
        ({**content, "step": "4"}, "lacks step: "),
        ({**content, "recipe": {}}, "lacks total_tokens: "),
        ({k: v for k, v in content.items() if k != "weights"}, "lacks weights: "),
        ({**content, "weights": {}}, "holds weights of another shape than demo/shape.py: "),
    ):
        torch.save(wrong, file)
        assert refused(1, train.main, begun, *TRAIN).startswith(f"{file} {sentence}")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--tokens 513", "--tokens is 513, expected 512"),
        ("--tokens 512 --seed 3", "--seed is 3, expected 0"),
        ("--tokens 512 --lr 0.5", "--lr is 0.5, expected 0.004"),
        (
            "--tokens 512 --matrix-lr 0.5 --seed 1",
            "--seed is 1, expected 0; --matrix-lr is 0.5, expected 0.02",
        ),
    ],
)
def test_other_flags_than_the_run_began_with(begun, refused, words, sentence):
    words = [*words.split(), "--eager", "--threads", "1"]
    expected = f"{sentence} as the run in this folder began with"
    assert refused(2, train.main, begun, *words) == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_is_not_a_finished_one(folder, refused, capsys, monkeypatch, number):
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        stop_after(patch, number)
        assert cli.run(train.main, [str(folder), *TRAIN]) == 128 + number
    assert capsys.readouterr().out == "stopped\n"
    assert signal.getsignal(number) == before
    assert state.load(folder).tokens == 256
    part = f"{folder / 'state.pt'} is at 256 of 512 tokens"
    sentence = f"{part}, expected a finished run (or --unfinished)"
    assert refused(2, export.main, folder, folder / "model") == sentence
    assert refused(2, ablations.main, folder) == sentence
    assert not (folder / "model").exists()
    assert refused(0, export.main, folder, folder / "model", "--unfinished") == part
    assert (folder / "model" / "config.json").exists()
    assert cli.run(train.main, [str(folder), *TRAIN]) == 0
    assert capsys.readouterr().out.endswith("finished\n")
    assert cli.run(export.main, [str(folder), str(folder / "model"), "--force"]) == 0
    assert capsys.readouterr().err == ""


def test_a_signal_at_the_end_finishes(folder, monkeypatch):
    stop_after(monkeypatch, signal.SIGTERM)
    assert cli.run(train.main, [str(folder), "--tokens", "256", *TRAIN[2:]]) == 0


def test_a_second_signal_ends_at_once():
    stop = cli.Stop()
    stop.handle(signal.SIGTERM, None)
    with pytest.raises(SystemExit) as ended:
        stop.handle(signal.SIGINT, None)
    assert ended.value.code == 130


def test_an_interrupt_before_the_first_step(folder, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "Run", interrupted)
    assert cli.run(train.main, [str(folder), *TRAIN]) == 130


def test_a_loss_that_is_not_finite(begun, capsys, monkeypatch):
    last = (begun / "state.pt").read_bytes()
    content = torch.load(begun / "state.pt", weights_only=True)
    torch.save({**content, "tokens": 256, "step": 1}, begun / "state.pt")
    last = (begun / "state.pt").read_bytes()
    weighted = train.weighted_loss

    def endless(logits, batch):
        loss, plain, answers = weighted(logits, batch)
        return loss * float("inf"), plain, answers

    monkeypatch.setattr(train, "weighted_loss", endless)
    capsys.readouterr()
    assert cli.run(train.main, [str(begun), *TRAIN]) == 1
    assert capsys.readouterr().err == (
        "loss of step 2 is inf, expected a finite number: state.pt is left as it was, begin anew "
        "with a lower --lr or --matrix-lr\n"
    )
    assert (begun / "state.pt").read_bytes() == last


def test_weights_that_are_not_finite_are_not_saved(begun):
    last = (begun / "state.pt").read_bytes()
    now = state.load(begun)
    bad = {**now.weights, "norm.weight": now.weights["norm.weight"] * float("nan")}
    with pytest.raises(FloatingPointError, match=r"^weights of step 2 are not finite: "):
        state.save(begun, state.State(**{**vars(now), "weights": bad}))
    assert (begun / "state.pt").read_bytes() == last


def test_a_full_disk_leaves_the_last_state(begun):
    now, last = state.load(begun), (begun / "state.pt").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(last) // 2, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: .*/state\.pt'"):
            state.save(begun, now)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (begun / "state.pt").read_bytes() == last
    assert not list(begun.glob("*.partial"))


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    file = tmp_path / "a.txt"
    with files.replaced(file) as partial:
        partial.write_text("whole")
        assert not file.exists()
        number = partial.stat().st_ino
    assert file.stat().st_ino == number, "moved, not written again"

    def halfway():
        with files.replaced(file) as partial:
            partial.write_text("ha")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        halfway()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert file.read_text() == "whole"


def test_a_second_trainer(folder, refused):
    with files.locked(folder):
        assert refused(1, train.main, folder, *TRAIN) == (
            f"{folder} is trained in by another process, expected a folder of its own"
        )
    assert not (folder / "state.pt").exists()
    assert cli.run(train.main, [str(folder), *TRAIN]) == 0


def test_a_directory_that_is_taken(begun, refused):
    model = begun / "model"
    assert cli.run(export.main, [str(begun), str(model)]) == 0
    assert refused(2, export.main, begun, model) == (
        f"{model} is not empty, expected a new directory (--force replaces a demo)"
    )
    assert cli.run(export.main, [str(begun), str(model), "--force"]) == 0
    assert refused(2, export.main, begun, begun / "log.txt") == (
        f"{begun / 'log.txt'} is a file, expected a directory to write to"
    )


def test_means_leave_out_what_is_not_there(recwarn):
    nan = float("nan")
    assert train.means([(1.0, nan, 0.0), (3.0, 5.0, 0.5)]) == [2.0, 5.0, 0.25]
    assert torch.tensor(train.means([(1.0, nan, 0.0)])).isnan().tolist() == [False, True, False]
    assert not recwarn.list
