"""`pagecore plan`, and a replay with the groups of a model."""

import json
from pathlib import Path

import pytest

from pagecore.cache import PagedKVCache
from pagecore.errors import UnsupportedOption
from pagecore.models import specs_from_config
from pagecore.models.multimodal.known_types import known_types
from pagecore.serving.replay import replay
from pagecore.serving.replay.options import ReplayOptions
from tests.cli.command_line import call, refused, write_trace
from tests.models.parameters.test_count import config_of
from tests.models.published import LLAMA_4_SCOUT, PUBLISHED

GEMMA = PUBLISHED["gemma-2-9b"]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GEMMA))
    return path


@pytest.fixture
def trace(tmp_path):
    """Write a trace of four requests that are longer than the window of the model."""
    lines = [{"timestamp": n, "input_length": 6000, "output_length": 9, "hash_ids": [n] * 12} for n in range(4)]
    return write_trace(tmp_path / "trace.jsonl", lines)


def test_plan_prints_its_tables_and_writes_json(capsys, tmp_path, config):
    out_file = tmp_path / "plan.json"
    options = ["--memory", "40GiB", "--ranks", 4, "--context", 8192, 4000, "--json", out_file]
    code, out, err = call(capsys, "plan", config, *options)
    assert (code, err) == (0, "")
    for part in ("gemma2, 42 layers, up to 8,192 tokens", "4,096", "257 + 512", "[20850, 41473]"):
        assert part in out
    plan = json.loads(out_file.read_text())
    assert (plan["ranks"], plan["num_blocks"]) == (4, 41534)
    assert [context["context"] for context in plan["contexts"]] == [8192, 4000]


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("command", ["plan", "replay", "whatif"])
def test_an_output_that_would_replace_the_config_is_refused(capsys, config, trace, command, is_folder):
    before, model = config.read_bytes(), config.parent if is_folder else config
    given = [model, "--memory", "40GiB"] if command == "plan" else [trace, "--model", model]
    assert "the config and --json are both" in refused(capsys, command, *given, "--json", config)
    assert config.read_bytes() == before


def test_an_output_that_would_replace_the_config_of_a_draft_is_refused(capsys, tmp_path, config):
    draft = tmp_path / "draft.json"
    draft.write_bytes(config.read_bytes())
    options = ["--device-memory", "80GiB", "--draft-model", draft, "--json", draft]
    assert "the config and --json are both" in refused(capsys, "plan", config, *options)


def test_every_option_reaches_the_plan(capsys, tmp_path, config):
    out_file = tmp_path / "plan.json"
    options = ["--memory", "1GiB", "--block-size", 32, "--dtype", "float32", "--json", out_file]
    assert call(capsys, "plan", config.parent, *options)[0] == 0
    plan = json.loads(out_file.read_text())
    assert (plan["memory"], plan["block_size"], plan["bytes_per_token"]) == (2**30, 32, 42 * 8 * 256 * 2 * 4)


def test_a_format_of_the_cache_changes_the_bytes(capsys, tmp_path):
    llama, out_file = Path(__file__).parents[1] / "models" / "llama-3.1-8b.json", tmp_path / "plan.json"
    blocks = {}
    for name in ("none", "float8_token", "nvfp4"):
        code, out, _ = call(capsys, "plan", llama, "--memory", "40GiB", "--kv-format", name, "--json", out_file)
        assert code == 0
        assert ("key_scale" in out.replace("\n", "")) == (name != "none")
        blocks[name] = json.loads(out_file.read_text())["num_blocks"]
    assert blocks == {"none": 20480, "float8_token": 39718, "nvfp4": 72817}


def test_values_in_another_format_than_keys_are_planned(capsys, tmp_path):
    llama, out_file = Path(__file__).parents[1] / "models" / "llama-3.1-8b.json", tmp_path / "plan.json"
    found = {}
    for keys, values in (("none", "int4_token"), ("float8_e4m3fn", "nvfp4"), ("nvfp4", "nvfp4")):
        options = ["--memory", "40GiB", "--kv-format", keys, "--value-format", values, "--json", out_file]
        code, _, err = call(capsys, "plan", llama, *options)
        assert (code, err) == (0, "")
        found[keys, values] = json.loads(out_file.read_text())["bytes_per_token"]
    # 32 layers, 8 heads of 128 numbers: keys, then codes and scales of values.
    assert found == {
        ("none", "int4_token"): 32 * 8 * (256 + 64 + 4),
        ("float8_e4m3fn", "nvfp4"): 32 * 8 * (128 + 64 + 8),
        ("nvfp4", "nvfp4"): 32 * 8 * 2 * (64 + 8),
    }


def test_latents_of_deepseek_v3_are_counted(capsys, tmp_path):
    deepseek, out_file = Path(__file__).parents[1] / "models" / "deepseek-v3.json", tmp_path / "plan.json"
    blocks = {}
    for name in ("auto", "float8_e4m3fn", "fp8_ds_mla", "nvfp4"):
        options = ["--memory", "10GiB", "--block-size", 64, "--kv-format", name, "--ranks", 8, "--json", out_file]
        code, out, _ = call(capsys, "plan", deepseek, *options)
        assert (code, "latent" in out) == (0, True)
        blocks[name] = json.loads(out_file.read_text())["num_blocks"]
    assert blocks == {"auto": 2387, "float8_e4m3fn": 4774, "fp8_ds_mla": 4192, "nvfp4": 7813}
    code, out, _ = call(capsys, "plan", deepseek, "--memory", "40GiB", "--kv-format", "nvfp4")
    assert (code, "latent 352" in out) == (0, True)


def test_a_device_is_planned_with_its_weights_and_reserves(capsys, tmp_path):
    llama, out_file = Path(__file__).parents[1] / "models" / "llama-3.1-8b.json", tmp_path / "plan.json"
    code, out, err = call(capsys, "plan", llama, "--device-memory", "80GiB", "--ranks", 4, "--json", out_file)
    assert (code, err) == (0, "")
    for part in ("80.0 GiB, one of 4 ranks", "0.825000", "multimodal", "8,030,261,248", "127,507 of 16 tokens"):
        assert part in out
    report = json.loads(out_file.read_text())["device"]
    assert (report["graph_batch"], report["free"], report["advice"]) == (512, 0, [])
    options = ["--weights", "fp8", "--chunked-prefill-size", 4096, "--graph-batch", 16, "--draft", "eagle"]
    options += ["--static-fraction", 0.75, "--data-parallel", 2, "--ranks", 2, "--kv-format", "float8_e4m3fn"]
    assert call(capsys, "plan", llama, "--device-memory", "40GiB", *options, "--json", out_file)[0] == 0
    report = json.loads(out_file.read_text())["device"]
    assert (report["weight_format"], report["static_fraction"], report["data_parallel"]) == ("fp8", 0.75, 2)
    assert report["classes"][2]["nbytes"] == (512 + 6144 + 32 + 256 + 16 * 2 * 3 + 2048) << 20
    assert "6.96 GiB are missing" in refused(capsys, "plan", llama, "--device-memory", "8GiB")
    assert "without device_memory" in refused(capsys, "plan", llama, "--memory", "8GiB", "--images", 3)
    refused(capsys, "plan", llama, "--memory", "8GiB", "--device-memory", "8GiB")


def test_advice_is_printed(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of("qwen2.5-vl-7b")))
    code, out, err = call(capsys, "plan", path, "--device-memory", "80GiB", "--images", 200, "--image-size", 1024)
    assert (code, err) == (0, "")
    assert "advice: chunked_prefill_size=2048" in out
    assert "missing" in out


def test_states_of_qwen3_next_are_planned(capsys, tmp_path):
    qwen, out_file = Path(__file__).parents[1] / "models" / "qwen3-next-80b-a3b.json", tmp_path / "plan.json"
    code, out, err = call(capsys, "plan", qwen, "--memory", "40GiB", "--json", out_file)
    assert (code, err) == (0, "")
    for part in ("qwen3_next, 48 layers", "262, 0.9 times the bytes of the blocks", "73.7 MiB", "num_states"):
        assert part in out
    assert json.loads(out_file.read_text())["states"]["num_slots"] == 263
    options = ["--memory", "40GiB", "--state-ratio", 1.9, "--ranks", 2, "--json", out_file]
    assert call(capsys, "plan", qwen, *options)[0] == 0
    assert json.loads(out_file.read_text())["states"]["num_slots"] == 2**30 * 40 * 19 // 29 // 38_633_472
    assert "state_ratio is 0.0" in refused(capsys, "plan", qwen, "--memory", "40GiB", "--state-ratio", 0)


def test_chunks_of_llama_4_are_planned(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_4_SCOUT))
    code, out, err = call(capsys, "plan", path, "--memory", "40GiB", "--context", 131072)
    assert (code, err) == (0, "")
    for part in ("llama4_text, 48 layers", "chunks of", "512 + 8,192"):
        assert part in out


def test_a_replay_of_a_model_with_latents_counts_their_bytes(trace):
    deepseek = json.loads((Path(__file__).parents[1] / "models" / "deepseek-v3.json").read_text())
    report = replay(trace, ReplayOptions(model=deepseek, memory="4GiB"))
    assert (report.requests_finished, report.num_blocks) == (4, 2**32 // (61 * 1152 * 16))


def test_a_replay_of_a_model_with_states_reports_them(capsys, tmp_path, trace):
    qwen, out_file = Path(__file__).parents[1] / "models" / "qwen3-next-80b-a3b.json", tmp_path / "out.json"
    code, out, err = call(capsys, "replay", trace, "--model", qwen, "--memory", "40GiB", "--json", out_file)
    assert (code, err) == (0, "")
    for part in ("blocks matched", "reused by states", "262 of 73.7 MiB each", "states evicted"):
        assert part in out
    report = json.loads(out_file.read_text())
    assert (report["requests_finished"], report["states"]["num_states"]) == (4, 263)
    for options, slots in ((["--num-states", 50], 50), (["--state-ratio", 0.1], 40 * 2**30 // 11 // 77_266_944)):
        code, *_ = call(capsys, "replay", trace, "--model", qwen, "--memory", "40GiB", *options, "--json", out_file)
        assert (code, json.loads(out_file.read_text())["states"]["num_states"]) == (0, slots)
    for option in ("num_states", "prompt_checkpoints"):
        flag = f"--{option.replace('_', '-')}"
        assert f"{option} is 5, but the model has no" in refused(capsys, "replay", trace, flag, 5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "--memory"),
        (["--memory", "1GiB", "--kv-format", "fp7"], "format is 'fp7'; use one of"),
        (["--memory", "1GiB", "--value-format", "none"], "value_format is 'none'; use one of"),
        (["--memory", "lots"], "memory is 'lots'"),
        (["--memory", "1KiB"], "two blocks"),
        (["--memory", "1GiB", "--ranks", "3"], "num_kv_heads is 8"),
        (["--memory", "1GiB", "--block-size", "0"], "block_size is 0"),
        (["--memory", "1GiB", "--context", "0"], "context is 0"),
        (["--memory", "1GiB", "--dtype", "int4"], "dtype 'int4'"),
        (["--memory", "1GiB", "--json", "/no/such/folder/x"], "does not exist; create it first"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused_in_one_line(capsys, config, options, reason):
    assert reason in refused(capsys, "plan", config, *options)


def test_families_are_listed_without_a_config(capsys):
    code, listed, err = call(capsys, "plan", "--families")
    assert (code, err) == (0, "")
    assert listed.split() == known_types()
    assert max(map(len, listed.splitlines())) <= 100


def test_a_bad_config_is_refused_in_one_line(capsys, tmp_path, config, trace):
    assert "No such file" in refused(capsys, "plan", tmp_path / "none", "--memory", "1GiB")
    config.write_text(json.dumps(GEMMA | {"model_type": "gemma9"}))
    for command in (["plan", config, "--memory", "1GiB"], ["replay", trace, "--model", config]):
        assert f'{config}: model_type is "gemma9", which is unknown' in refused(capsys, *command)


def test_a_replay_of_a_model_uses_its_groups_and_bytes(capsys, tmp_path, config, trace, monkeypatch):
    made = []
    init = PagedKVCache.__init__

    def watched(self, *arguments, **options):
        init(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(PagedKVCache, "__init__", watched)
    out_file = tmp_path / "out.json"
    code, _, err = call(capsys, "replay", trace, "--model", config, "--memory", "8GiB", "--json", out_file)
    assert (code, err) == (0, "")
    report = json.loads(out_file.read_text())
    assert report["requests_finished"] == 4
    # A sequence of 8192 tokens holds 257 blocks of the windows and 512 of the other group.
    assert 2**33 // (42 * 8 * 256 * 2 * 2 * 16) < report["num_blocks"] == 2056
    assert [cache.num_groups for cache in made] == [2]
    assert made[0].num_blocks == PagedKVCache(specs_from_config(config), memory="8GiB", device="none").num_blocks
    assert max(made[0].num_blocks) == report["num_blocks"]
    assert (made[0].num_layers, made[0].device) == (42, "none")


def test_blocks_outside_the_window_are_freed_during_a_replay(trace):
    """Half of the layers have a window of 16 tokens, so a request holds only a few blocks of their group."""
    small = GEMMA | {"sliding_window": 16}
    full = GEMMA | {"layer_types": ["full_attention"] * 42}
    with_window, without = (
        replay(trace, ReplayOptions(model=model, blocks=2000, max_tokens_per_step=512)) for model in (small, full)
    )
    assert with_window.requests_finished == without.requests_finished == 4
    assert with_window.utilization_mean < 0.7 * without.utilization_mean


@pytest.mark.parametrize("options", [{"bytes_per_token": 5}, {"attend": True}])
def test_options_that_a_model_determines_exclude_it(options):
    with pytest.raises(UnsupportedOption, match="exclude each other"):
        ReplayOptions(model=GEMMA, **options)


def test_bytes_per_token_and_model_exclude_each_other_on_the_command_line(capsys, config, trace):
    assert "not allowed with" in refused(capsys, "replay", trace, "--model", config, "--bytes-per-token", 5)


def test_without_a_model_a_token_has_the_bytes_of_llama_3_8b():
    assert ReplayOptions(memory="1GiB").num_blocks == ReplayOptions(memory="1GiB", bytes_per_token=131072).num_blocks
    assert ReplayOptions(memory="1GiB", model=PUBLISHED["llama-3-8b"]).num_blocks == 512
