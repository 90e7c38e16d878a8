"""Depth tables from text, and the files that hold them."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from forebay.bench.dlm import tasks
from forebay.diffusion.depth import FILE, TABLES, DepthTable, find_table
from forebay.diffusion.depth_file import DepthFile, Measured, Model, read_file, write_file
from forebay.diffusion.depth_plot import draw
from forebay.diffusion.errors import DiffusionError
from forebay.diffusion.fingerprint import fingerprint
from forebay.diffusion.profile import Profiler, ProfileSettings, apply_tau, parse_shares
from forebay.diffusion.weights import read_config

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests/assets/tinydlm-prefix"
_, CONFIG = read_config(MODEL)


def settings(text: Path = ROOT / "docs", **changes) -> ProfileSettings:
    return ProfileSettings(text=text, **({"samples": 3, "shares": (20, 60, 85), "length": 160} | changes))


@pytest.fixture(scope="module")
def legend_table(tmp_path_factory: pytest.TempPathFactory) -> DepthFile:
    """Of chats whose table (86 % of them) comes before the meaning of its letters."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    folder, model = (
        tmp_path_factory.mktemp("chats"),
        Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("copy") / "m")),
    )
    (model / "chat_template.jinja").write_text("{% for one in messages %}{{ one.content }}{% endfor %}")
    lines = []
    for item in tasks.items(MODEL, "legend", 12, 11):
        turns = [("system", item.prefix), ("user", item.rest), ("assistant", item.answer)]
        lines.append({"messages": [{"role": role, "content": tokenizer.decode(part)} for role, part in turns]})
    (folder / "legends.jsonl").write_text("\n".join(map(json.dumps, lines)))
    profiler = Profiler(model, settings(folder / "legends.jsonl", samples=12, shares=(90,)))
    return profiler.file(profiler.run(folder / "part"))


# ---- what is measured ----


def test_the_rules_on_a_model_that_depends_on_its_prefix(legend_table: DepthFile) -> None:
    """The paper's depth loses the answers of this very task, ours keeps them: see `test_decoding`."""
    (measured,) = legend_table.similarities
    assert measured.samples == 12
    assert measured.mean[0] == pytest.approx(1, abs=1e-5)
    table = DepthTable(legend_table.leading, 6, "")
    assert table.depth(95, 100, 0, "paper") == 2
    assert table.depth(95, 100, 0) == 1


def test_depths_follow_from_what_was_measured(tmp_path: Path) -> None:
    """On running text, whatever it says."""
    profiler = Profiler(MODEL, settings(samples=8, shares=(50, 86), length=512))
    file = profiler.file(profiler.run(tmp_path / "part"))
    table = DepthTable(file.leading, 6, "")
    leading = [next((at for at, mean in enumerate(one.mean) if mean <= 0.97), 6) for one in file.similarities]
    expected = [leading[0], max(leading)]
    assert [table.depth(percent, 100, 0, "paper") for percent in (50, 86)] == expected
    assert [table.depth(percent, 100, 0) for percent in (50, 86)] == [
        count if count == 6 else max(1, count - 1) for count in expected
    ]
    assert all(worst <= mean + 1e-6 for one in file.similarities for worst, mean in zip(one.worst, one.mean))


def test_the_least_similar_token_is_seen(legend_table: DepthFile) -> None:
    (measured,) = legend_table.similarities
    assert measured.mean[1] > 0.97
    strict = apply_tau(legend_table, worst_tau=measured.worst[1] + 0.001)
    assert strict.leading == {0: 1}
    assert apply_tau(legend_table, worst_tau=measured.worst[1] - 0.001).leading == legend_table.leading


@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_run_ends_like_one_that_was_not(tmp_path: Path, after: int) -> None:
    whole = Profiler(MODEL, settings()).run(tmp_path / "never")
    calls = []

    def interrupt(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == after:
            raise KeyboardInterrupt

    first = Profiler(MODEL, settings())
    with pytest.raises(KeyboardInterrupt):
        first.run(tmp_path / "part", interrupt)
    again: list[tuple[int, int]] = []
    assert Profiler(MODEL, settings()).run(tmp_path / "part", lambda *tokens: again.append(tokens)) == whole
    assert len(again) == len(first.samples) - after
    assert not again or again[-1] == (first.tokens, first.tokens)
    assert list(tmp_path.iterdir()) == []


def test_the_rest_of_another_run_is_left_alone(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Profiler(MODEL, settings()).run(tmp_path / "part", interrupt)
    kept = (tmp_path / "part").read_bytes()
    with pytest.raises(DiffusionError, match="part is an interrupted run with another model, text or settings"):
        Profiler(MODEL, settings(seed=1)).run(tmp_path / "part")
    assert (tmp_path / "part").read_bytes() == kept


def test_what_a_run_will_take(tmp_path: Path) -> None:
    profiler = Profiler(MODEL, settings())
    assert profiler.passes == 3 * 4
    assert profiler.tokens == 3 * (160 + 32 + 96 + 136)
    assert 0 < profiler.estimate() < 60


# ---- settings ----


@pytest.mark.parametrize(
    ("text", "shares"), [("20,40", (20, 40)), ("5-20:5", (5, 10, 15, 20)), ("1-3,90", (1, 2, 3, 90)), ("7", (7,))]
)
def test_shares(text: str, shares: tuple[int, ...]) -> None:
    assert parse_shares(text) == shares


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "--samples 0: give at least 1"),
        ({"length": 99}, "--length 99: give at least 100"),
        ({"shares": (0, 5)}, "--shares 0,5: give rising per cents from 1 to 99"),
        ({"shares": (9, 5)}, "--shares 9,5: give rising"),
        ({"shares": ()}, "--shares : give rising"),
        ({"dtype": "int8"}, "--dtype 'int8' is not float32 or bfloat16"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DiffusionError, match=message):
        settings(**changes)


def test_windows_longer_than_the_model() -> None:
    with pytest.raises(DiffusionError, match="--length 1025: the model has 1024 positions"):
        Profiler(MODEL, settings(length=1025))


def test_devices_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DiffusionError, match=r"--device warp: .*; give another device"):
        Profiler(MODEL, settings(device="warp")).run(tmp_path / "part")


@pytest.mark.parametrize(("taus", "message"), [((1.0, None), "--tau 1"), ((0.9, 1.0), "--worst-tau 1")])
def test_thresholds_that_are_none(legend_table: DepthFile, taus: tuple[float, float | None], message: str) -> None:
    with pytest.raises(DiffusionError, match=message):
        apply_tau(legend_table, *taus)


# ---- thresholds and files ----


def measured(**means: list[float]) -> list[Measured]:
    return [Measured(share=int(name[1:]), samples=1, mean=mean, worst=mean) for name, mean in means.items()]


def test_another_threshold_needs_no_new_run() -> None:
    found = measured(s20=[1, 0.96, 0.9], s60=[1, 0.93, 0.9], s80=[1, 0.98, 0.96])
    file = DepthFile(model=Model(layers=3), leading={}, similarities=found)
    assert apply_tau(file).leading == {0: 1, 80: 2}
    assert apply_tau(file, 0.95).leading == {0: 1, 20: 2, 80: 3}


def test_a_file_is_read_as_it_was_written(tmp_path: Path, legend_table: DepthFile) -> None:
    write_file(tmp_path / "a.json", legend_table)
    assert read_file(tmp_path / "a.json") == legend_table
    table = DepthTable.read(tmp_path / "a.json", 6)
    assert (table.leading, table.layers, table.tau) == (legend_table.leading, 6, 0.97)
    table.write(tmp_path / "b.json")
    assert DepthTable.read(tmp_path / "b.json", 6) == table
    with pytest.raises(DiffusionError, match="no similarities, only depths"):
        apply_tau(read_file(tmp_path / "b.json"))


@pytest.mark.parametrize("name", TABLES)
def test_shipped_tables_as_files(tmp_path: Path, name: str) -> None:
    TABLES[name].write(tmp_path / FILE)
    assert DepthTable.read(tmp_path / FILE, TABLES[name].layers) == TABLES[name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
        ({"version": 2}, "version: Input should be 1"),
        ({"leading": {"0": 1, "50": 7}}, "leading: every number of layers must be 1 to 6"),
        ({"leading": {"0": 3, "50": 2}}, "leading: shares and layers must both rise"),
        ({"leading": {"101": 2}}, "leading.101"),
        ({"tau": 1.5}, "tau: Input should be less than 1"),
        ({"model": {"layers": 6, "hidden": 3}}, "model.hidden: Extra inputs"),
        (
            {"similarities": [{"share": 5, "samples": 1, "mean": [1], "worst": [1]}]},
            "similarities at share 5: must be 6",
        ),
    ],
)
def test_files_that_are_none(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"model": {"layers": 6}, "leading": {"0": 1}} | changes))
    with pytest.raises(DiffusionError, match=f"a.json is no depth table: .*{message}"):
        read_file(path)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(DiffusionError, match="No such file"):
        DepthTable.read(tmp_path / "absent.json")
    with pytest.raises(DiffusionError, match="give a file that can be written"):
        TABLES["LLaDA-8B-Instruct"].write(tmp_path / "absent/a.json")
    TABLES["LLaDA-8B-Instruct"].write(tmp_path / "a.json")
    with pytest.raises(DiffusionError, match="a model with 32 layers, this one has 6; make a table"):
        DepthTable.read(tmp_path / "a.json", 6)


def test_a_picture(tmp_path: Path, legend_table: DepthFile) -> None:
    draw(legend_table, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DiffusionError, match=r"--plot .*; give a file such as depth.png"):
        draw(legend_table, tmp_path / "a.xyz")


# ---- which table a model is served with ----


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "copy"))


def test_nobody_has_measured(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = find_table(copy, CONFIG)
    assert {table.depth(percent, 100, 0, rule) for percent in range(101) for rule in ("paper", "boundary")} == {1}
    assert "forebay profile-depth" in caplog.text


@pytest.mark.parametrize(
    "place", ["LLaDA-8B-Instruct", "models--GSAI-ML--LLaDA-8B-Instruct/snapshots/08b83a6", "GSAI-ML/LLaDA-8B-Instruct"]
)
def test_a_table_that_ships_by_the_name_of_the_folder(tmp_path: Path, place: str) -> None:
    config = type("Config", (), {"layers": 32})()
    assert find_table(tmp_path / place, config) is TABLES["LLaDA-8B-Instruct"]
    config.layers = 31
    assert find_table(tmp_path / place, config).leading == {0: 1}


def test_a_table_that_ships_by_the_name_in_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_name_or_path": "Dream-org/Dream-v0-Instruct-7B"}')
    config = type("Config", (), {"layers": 28})()
    assert find_table(tmp_path, config) is TABLES["Dream-v0-Instruct-7B"]


def test_the_models_own_table_comes_first(
    copy: Path, legend_table: DepthFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    write_file(copy / FILE, legend_table)
    assert find_table(copy, CONFIG).leading == legend_table.leading
    assert not caplog.text
    weights = load_file(copy / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, copy / "model.safetensors")
    assert find_table(copy, CONFIG).leading == legend_table.leading
    assert "was made for other weights" in caplog.text
    (copy / FILE).write_text("{")
    with pytest.raises(DiffusionError, match="is no depth table"):
        find_table(copy, CONFIG)


def test_fingerprints(copy: Path) -> None:
    assert fingerprint(copy) == fingerprint(MODEL)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    assert fingerprint(copy) != fingerprint(MODEL)
