"""Claims about launch/kubeflow.yaml and launch/skypilot.yaml."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

from dtmega import config
from tests.launch.pages import ROOT, resumable_codes

LAUNCH = ROOT / "launch"
RUNTIME, JOB = yaml.safe_load_all((LAUNCH / "kubeflow.yaml").read_text(encoding="utf-8"))
TASK = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text(encoding="utf-8"))
NODE = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]


def check_arguments(arguments: list[str], n_ranks: int) -> None:
    """The arguments of node.sh must be those of a run on this number of ranks."""
    run, *others = arguments
    cfg = config.load(["--run.dir", run, *others])
    assert cfg.run.dir == run
    assert cfg.mesh.dp_replicate * cfg.mesh.dp_shard * cfg.mesh.tp * cfg.mesh.pp == n_ranks


def sky_run(folder: Path, node: int) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of launch/node.sh in SkyPilot's command on this node; a script stands in its place."""
    (folder / "launch").mkdir()
    script = folder / "launch" / "node.sh"
    program = "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    script.write_text(f"#!{sys.executable}\n{program}")
    script.chmod(0o755)
    sky = {"NUM_NODES": "2", "NODE_RANK": str(node), "NUM_GPUS_PER_NODE": "8", "NODE_IPS": "10.0.0.1\n10.0.0.2"}
    environment = os.environ | {f"SKYPILOT_{name}": value for name, value in sky.items()}
    command = ["bash", "-c", TASK["run"]]
    told = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=True).stdout
    return tuple(json.loads(told))


def kubeflow_action(code: int) -> str:
    """The action of the manifest's JobSet after a pod of its Job has exited with this code.

    Kubernetes tries rules in order; the words are those of its Job controller for a pod that a rule has matched.
    """
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(NODE["podFailurePolicy"]["rules"]):
        exit_codes = rule["onExitCodes"]
        assert (rule["action"], exit_codes["operator"]) == ("FailJob", "In")
        if code in exit_codes["values"]:
            reason = "PodFailurePolicy"
            message = f"Container node for pod a/b failed with exit code {code} matching FailJob rule at index {index}"
            break
    for rule in RUNTIME["spec"]["template"]["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize("name", ["kubeflow.yaml", "skypilot.yaml"])
def test_a_manifest_that_ran_on_no_cluster_says_so_in_its_first_line(name):
    assert (LAUNCH / name).read_text(encoding="utf-8").startswith("# Not run on a cluster")


def test_the_job_of_kubeflow_trains_on_all_its_gpus():
    trainer = JOB["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]
    assert trainer["command"] == ["node.sh"]
    check_arguments(trainer["args"], trainer["numNodes"] * trainer["numProcPerNode"])


def test_the_names_in_the_runtime_of_kubeflow_fit_each_other():
    """The Trainer looks for the job and the container `node`; exit codes decide only about pods that never restart."""
    job = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"][0]
    (container,) = NODE["template"]["spec"]["containers"]
    assert (job["name"], container["name"]) == ("node", "node")
    assert NODE["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == "node"
    assert NODE["template"]["spec"]["restartPolicy"] == "Never"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in NODE["template"]["spec"]["volumes"]}
    assert JOB["spec"]["runtimeRef"]["name"] == RUNTIME["metadata"]["name"]
    assert JOB["apiVersion"] == RUNTIME["apiVersion"] == "trainer.kubeflow.org/v1alpha1"


def test_kubeflow_starts_again_what_resumes_without_a_limit_if_it_was_saved_and_never_what_is_refused():
    """Code 1 is tried again, because a rank says 1, too, if another was killed; so is 137, the code of a killed pod."""
    bounded, unbounded = "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"
    expected = {1: bounded, 2: "FailJobSet", 3: "FailJobSet", 75: unbounded, 76: unbounded, 77: bounded, 137: bounded}
    assert {code: kubeflow_action(code) for code in expected} == expected
    resumable = [code for code, resumes in resumable_codes().items() if resumes]
    assert [code for code in resumable if kubeflow_action(code) == "FailJobSet"] == []


def test_skypilot_starts_again_what_the_page_says_and_nothing_else():
    recovery = TASK["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [code for code, resumes in resumable_codes().items() if resumes]
    assert recovery["max_restarts_on_errors"] == 0


def test_torchrun_reads_from_the_environment_what_skypilot_says_of_the_nodes(tmp_path, monkeypatch):
    arguments, environment = sky_run(tmp_path, node=1)
    check_arguments(arguments, TASK["num_nodes"] * int(TASK["resources"]["accelerators"].partition(":")[2]))
    assert (LAUNCH / "node.sh").stat().st_mode & 0o111
    for name, value in environment.items():
        if name.startswith("PET_"):
            monkeypatch.setenv(name, value)
    options = parse_args(["train.py"])
    assert (options.nnodes, options.node_rank, options.nproc_per_node) == ("2", 1, "8")
    assert (options.master_addr, options.master_port) == ("10.0.0.1", 29500)


def test_kubeflows_published_api_keeps_every_key_of_the_manifest():
    """Its models ignore unknown keys, so a key that they do not know would be missing from what they write."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    kinds: list[tuple[Any, Any]] = [
        (models.TrainerV1alpha1TrainingRuntime, RUNTIME),
        (models.TrainerV1alpha1TrainJob, JOB),
    ]
    for kind, manifest in kinds:
        assert kind.from_dict(manifest).to_dict() == manifest


def test_skypilots_loader_takes_the_task():
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(LAUNCH / "skypilot.yaml"))
    (resources,) = task.resources
    assert (task.num_nodes, resources.accelerators, resources.use_spot) == (2, {"H100": 8}, True)
