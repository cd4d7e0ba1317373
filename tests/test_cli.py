"""The command line: what each command promises, its exit status, and what it says when something is missing."""

import importlib.metadata
import json
import subprocess
import sys
import textwrap

import pytest
import torch

import qknorm
from qknorm import cli, demo


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def run_json(capsys, *argv: str) -> tuple[int, dict]:
    status = cli.main([*argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


def without_compile(monkeypatch) -> None:
    monkeypatch.setattr(demo, "_compiled", lambda *args: demo.Step("compile", None, "left out of this test"))


def dtypes(calls: list[dict]) -> set[tuple[str, str, str]]:
    return {tuple(call[name]["dtype"] for name in ("query", "key", "value")) for call in calls}


def test_demo_shows_the_leak_what_refuses_it_and_that_all_of_it_is_gone(capsys):
    status, found = run_json(capsys, "demo")
    assert status == 0
    assert found["model"] == "ChromaTransformer2DModel"
    assert "2.12" in found["policy"]
    assert found["cause"] == "autocast policy"
    assert len(found["before"]) == len(found["after"]) == 2
    assert dtypes(found["before"]) == {("float32", "float32", "bfloat16")}
    assert dtypes(found["after"]) == {("bfloat16", "bfloat16", "bfloat16")}
    assert {"ValueError: Query, key, and value must have the same dtype."} <= {r["error"] for r in found["refusals"]}
    assert {r["check"] for r in found["refusals"]} == {"_check_device", "_check_qkv_dtype_bf16_or_fp16"}
    assert found["replaced"] == 6
    assert "QKRMSNorm" in found["report"]
    assert not found["failed"]
    assert [step["ok"] for step in found["steps"]] == [True] * 9
    assert any("fullgraph=True" in step["name"] for step in found["steps"])


@pytest.mark.parametrize("model", ["flux", "flux2"])
def test_demo_runs_on_the_other_models_that_leak(model, capsys, monkeypatch):
    without_compile(monkeypatch)
    status, found = run_json(capsys, "demo", "--model", model)
    assert status == 0
    assert found["model"] == demo.MODELS[model]
    assert dtypes(found["before"]) == {("float32", "float32", "bfloat16")}
    assert dtypes(found["after"]) == {("bfloat16", "bfloat16", "bfloat16")}
    assert found["refusals"]


def test_demo_says_of_a_model_that_leaks_nothing_that_it_leaks_nothing(capsys, monkeypatch):
    without_compile(monkeypatch)
    status, found = run_json(capsys, "demo", "--model", "krea2")
    assert status == 0
    assert found["cause"].startswith("none")
    assert not found["refusals"]
    assert found["replaced"]
    assert dtypes(found["before"]) == dtypes(found["after"]) == {("bfloat16", "bfloat16", "bfloat16")}


def test_demo_exits_with_one_when_something_that_should_hold_does_not(capsys, monkeypatch):
    without_compile(monkeypatch)
    monkeypatch.setattr(demo.replace, "replace_qk_norms", lambda model: qknorm.replace.Report("did nothing"))
    status, found = run_json(capsys, "demo")
    assert status == 1
    assert {"replace_qk_norms", "q, k and v", "the flash backend's constraints"} <= set(found["failed"])
    assert cli.main(["demo"]) == 1
    assert "Failed: replace_qk_norms" in capsys.readouterr().out.replace("\n", " ")


def test_demo_names_the_step_that_needs_a_compiler_where_there_is_none(capsys):
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        status, found = run_json(capsys, "demo")
    assert status == 0
    (step,) = [step for step in found["steps"] if step["ok"] is None]
    assert "fullgraph=True" in step["name"]
    assert "no C++ compiler" in step["detail"]


def test_demo_prints_it_as_a_person_reads_it(capsys, monkeypatch):
    without_compile(monkeypatch)
    assert cli.main(["demo"]) == 0
    out = capsys.readouterr().out
    for text in ("ChromaTransformer2DModel", "autocast policy", "must have the same dtype", "QKRMSNorm", "✓"):
        assert text in out
    assert "\x1b[" not in out


@pytest.mark.parametrize(("missing", "extra"), [("rich", "demo"), ("diffusers", "diffusers")])
def test_a_missing_package_is_named_with_what_to_install(missing, extra):
    # A process of its own, in which the package cannot be found.
    code = f"""
        import importlib.util, sys
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *a: None if name == "{missing}" else find(name, *a)
        sys.modules["{missing}"] = None
        from qknorm.cli import main
        sys.exit(main(["demo"]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 2
    assert f'pip install "qknorm[{extra}]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_audit_of_a_class_by_name_tells_leak_cause_and_repair(capsys):
    assert cli.main(["audit", "FluxTransformer2DModel"]) == 0
    out = capsys.readouterr().out
    for text in ("leak", "autocast policy", "refused by", "replace_qk_norms fixes 2, and leaves 0"):
        assert text in out
    assert cli.main(["audit", "FluxTransformer2DModel", "--strict"]) == 1
    assert cli.main(["audit", "FluxTransformer2DModel", "--autocast", "none", "--strict"]) == 0


def test_audit_exits_with_one_where_a_leak_is_left_that_no_norm_can_fix(capsys):
    status, found = run_json(capsys, "audit", "Ideogram4Transformer2DModel", "--weights", "fp32")
    assert status == 1
    assert found["left_after_replacing"]
    assert {cause for call in found["left_after_replacing"] for cause in call["causes"]} == {"RoPE"}


def test_audit_takes_a_function_that_returns_a_model_and_its_inputs(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
            import torch
            from qknorm import tiny
            def make():
                return tiny.build("FluxTransformer2DModel", dtype=torch.bfloat16)
            def wrong():
                return 3
            def broken():
                raise KeyError("no such file")
            def unfit():
                return torch.nn.Linear(2, 2), (torch.ones(3),)
        """)
    )
    monkeypatch.chdir(tmp_path)
    status, found = run_json(capsys, "audit", "mine:make")
    assert status == 0
    assert found["leaks"] == 2
    for target, message in (
        ("mine:wrong", "must return (model, inputs)"),
        ("mine:broken", "mine:broken raised KeyError"),
        ("mine:unfit", "the forward of mine:unfit raised RuntimeError"),
        ("mine:absent", "absent"),
        ("no_such_module:make", "no_such_module"),
    ):
        assert cli.main(["audit", target]) == 2
        assert message in capsys.readouterr().err


def test_audit_of_an_unknown_class_names_close_ones(capsys):
    assert cli.main(["audit", "FluxTransformer2DModle"]) == 2
    assert "FluxTransformer2DModel" in capsys.readouterr().err


def test_audit_runs_without_data_and_at_a_reduced_depth(capsys):
    assert cli.main(["audit", "FluxTransformer2DModel", "--meta"]) == 0
    assert "meta device" in capsys.readouterr().out
    assert cli.main(["audit", "WanTransformer3DModel", "--depth", "1"]) == 0
    assert "reduced depth" in capsys.readouterr().out


def test_env_prints_versions_devices_and_paths(capsys):
    status, found = run_json(capsys, "env")
    assert status == 0
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert found["paths"]["cpu"] == "torch"
    assert cli.main(["env"]) == 0
    assert "takes the torch path" in capsys.readouterr().out


def test_python_dash_m_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "qknorm", "env"], capture_output=True, text=True, check=True)
    assert "takes the torch path" in done.stdout
