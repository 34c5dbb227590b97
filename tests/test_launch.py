"""What the files in launch/ start, as it stands, where there is no cluster."""

import json
import os
import re
import socket
import stat
import subprocess
import sys

import jsonschema
import pytest
import yaml

from fwpkm_jax.training.checkpoints.restore import checkpoint_steps
from tests.training import mesh_flags
from tests.training.conftest import read_records
from tests.training.processes import CONFIG, ROOT, finish

# Starts SLURM_NTASKS copies of a command on this machine, with the variables that JAX reads.
SRUN = """#!{python}
import os, subprocess, sys
command = [word for word in sys.argv[1:] if word != "--kill-on-bad-exit=1"]
step = {{"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": "1"}}
tasks = [
    subprocess.Popen(command, env=os.environ | step | {{"SLURM_PROCID": i, "SLURM_LOCALID": i}})
    for i in map(str, range(int(os.environ["SLURM_NTASKS"])))
]
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = "#!/bin/bash\necho scontrol $*\n"


def write_program(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def environment(tmp_path):
    """Two processes of one simulated device each; commands found in `tmp_path/bin`."""
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin" / "python", f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    return {
        **os.environ,
        **mesh_flags.environment(1),
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }


def read_jobset(kind):
    return yaml.safe_load((ROOT / "launch" / f"{kind}_jobset.yaml").read_text())


@pytest.mark.parametrize("kind", ["gpu", "tpu"])
def test_a_jobset_has_the_fields_and_types_of_its_resource_definition(kind):
    schema = json.loads((ROOT / "tests" / "jobset_schema.json").read_text())
    manifest = read_jobset(kind)
    jsonschema.validate(manifest, schema, jsonschema.Draft7Validator)
    assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    (job,) = manifest["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    # Exit code 2, of a configuration that is refused, ends the set; any other code restarts it.
    (rule,) = pods["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert rule["onExitCodes"]["values"] == [2]
    (policy,) = manifest["spec"]["failurePolicy"]["rules"]
    assert policy["onJobFailureReasons"] == ["PodFailurePolicy"]
    # Nobody's rights but a user's, and no token of the cluster.
    spec = pods["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    job["backofLimit"] = 0
    with pytest.raises(jsonschema.ValidationError, match="backofLimit"):
        jsonschema.validate(manifest, schema, jsonschema.Draft7Validator)


def test_the_tpu_jobset_asks_for_the_chips_of_its_topology():
    (job,) = read_jobset("tpu")["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    spec = pods["template"]["spec"]
    (container,) = spec["containers"]
    rows, columns = map(int, spec["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    chips = container["resources"]["limits"]["google.com/tpu"] * pods["completions"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert rows * columns == chips == int(variables["CHIPS"])
    assert pods["parallelism"] == pods["completions"]


# Options of sbatch that a directive may give, with the form of their values; None: a flag.
SBATCH = {
    "nodes": r"\d+",
    "gpus-per-node": r"\d+",
    "ntasks-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "time": r"\d+:\d\d:\d\d",
    "signal": r"(B:|R:)?[A-Z]+@\d+",
    "requeue": None,
    "open-mode": r"append|truncate",
}


def test_the_directives_of_the_slurm_script_are_those_of_sbatch():
    lines = (ROOT / "launch" / "slurm.sh").read_text().splitlines()
    found = {}
    for number, line in enumerate(lines):
        if line.startswith("#SBATCH"):
            # sbatch stops reading directives at the first command.
            assert all(not before or before.startswith("#") for before in lines[:number])
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            form = SBATCH[name]
            assert (value == "") if form is None else re.fullmatch(form, value), line
            found[name] = value
    assert {"requeue", "signal"} <= found.keys()
    assert found["gpus-per-node"] == found["ntasks-per-node"]


@pytest.mark.parametrize("script", ["slurm.sh", "tpu_queued_resource.sh"])
def test_a_script_is_one_that_bash_reads(script):
    subprocess.run(["bash", "-n", ROOT / "launch" / script], check=True)


def test_a_flag_of_the_compiler_is_one_that_was_measured():
    measured = (ROOT / "docs" / "measurements" / "performance.md").read_text()
    for path in (ROOT / "launch").iterdir():
        for flag in re.findall(r"--xla_\w+", path.read_text()):
            assert flag in measured, f"{path.name}: {flag}"


# Answers from a list of states and exit codes, and writes what it was asked.
GCLOUD = """#!{python}
import argparse, pathlib, sys
asked = sys.argv[1:]
here = pathlib.Path(__file__).parent
parser = argparse.ArgumentParser(allow_abbrev=False)
queue, verb = asked[2] == "queued-resources", asked[3]
parser.add_argument("id")
parser.add_argument("--zone", required=True)
if verb == "create":
    for flag in ("--node-id", "--accelerator-type", "--runtime-version"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--spot", action="store_true")
elif verb == "delete":
    for flag in ("--force", "--quiet"):
        parser.add_argument(flag, action="store_true", required=True)
elif verb == "describe":
    parser.add_argument("--format", required=True)
else:
    parser.add_argument("--worker", required=True)
    parser.add_argument("--command", required=True)
options = parser.parse_args(asked[4:])
assert asked[:2] == ["compute", "tpus"] and (options.id, options.zone) == ("mine", "zone")
with open(here / "asked", "a") as file:
    print(verb, getattr(options, "command", ""), file=file)
if verb in ("describe", "ssh"):
    answers = (here / verb).read_text().splitlines()
    (here / verb).write_text(chr(10).join(answers[1:]))
    if verb == "ssh":
        sys.exit(int(answers[0]))
    if answers[0] == "NOT_FOUND":
        sys.exit("ERROR: NOT_FOUND: no such queued resource")
    print(answers[0])
"""


@pytest.mark.by_default("fails")
@pytest.mark.parametrize(
    ("codes", "states", "verbs"),
    [
        # The slice is taken away while it trains; another one finishes.
        (
            [0, 255, 0, 0],
            "NOT_FOUND PROVISIONING ACTIVE SUSPENDING SUSPENDED NOT_FOUND ACTIVE",
            "describe create describe describe ssh ssh describe describe delete describe create "
            "describe ssh ssh",
        ),
        # Training fails on a slice that stays.
        ([0, 1, 1, 1], "ACTIVE ACTIVE ACTIVE", "describe ssh ssh describe ssh describe ssh"),
    ],
    ids=["taken_away", "fails"],
)
def test_a_queued_resource_is_asked_for_again_until_training_has_finished(
    tmp_path, codes, states, verbs
):
    write_program(tmp_path / "gcloud", GCLOUD.format(python=sys.executable))
    (tmp_path / "describe").write_text(states.replace(" ", "\n"))
    (tmp_path / "ssh").write_text("\n".join(map(str, codes)))
    done = subprocess.run(
        [ROOT / "launch" / "tpu_queued_resource.sh", "mine", "recall", "--run_dir", "/runs/a b"],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "ZONE": "zone", "TYPE": "v6e-16", "VERSION": "v2", "SETUP": "prepare",
            "POLL_SECONDS": "0",
        },
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    asked = [line.split(" ", 1) for line in (tmp_path / "asked").read_text().splitlines()]
    assert [verb for verb, _ in asked] == verbs.split(), done.stderr
    commands = [command for verb, command in asked if verb == "ssh"]
    assert commands[0] == "prepare"
    assert commands[1].strip() == (
        "cd fwpkm_jax && exec python3 train.py recall --distributed.detect True --run_dir "
        "/runs/a\\ b"
    )
    assert done.returncode == (0 if codes[-1] == 0 else 1)
    assert ("finished" in done.stdout) == (codes[-1] == 0)


def job_with_a_free_port():
    """A job number from which JAX's Slurm support makes a port that is free here."""
    for number in range(os.getpid() % 4096, 2 * 4096):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", number % 4096 + 61440)):
                return str(number)
    raise AssertionError("no free port")


@pytest.mark.slow
def test_the_slurm_script_trains_in_two_tasks_and_requeues_after_sigterm(tmp_path, environment):
    write_program(tmp_path / "bin" / "srun", SRUN.format(python=sys.executable))
    write_program(tmp_path / "bin" / "scontrol", SCONTROL)
    job = job_with_a_free_port()
    environment |= {"SLURM_JOB_ID": job, "SLURM_NTASKS": "2"}
    run = tmp_path / "run"
    script = ["bash", "launch/slurm.sh", str(CONFIG), "--run_dir", str(run)]
    done = subprocess.run(
        [*script, "--training.steps", "4"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Finished 4 steps" in done.stdout
    assert checkpoint_steps(run / "checkpoints") == [4]
    # A task that ends as after SIGTERM.
    (tmp_path / "bin" / "srun").write_text("#!/bin/bash\nexit 143\n")
    done = subprocess.run(
        script, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (
        143,
        f"scontrol requeue {job}\n",
    )


@pytest.mark.slow
def test_the_jobsets_pods_train_together(tmp_path, environment):
    manifest = read_jobset("gpu")
    (workers,) = manifest["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert int(variables["PODS"]) == job["parallelism"] == job["completions"]
    assert int(variables["GPUS_PER_POD"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    host, port = variables["COORDINATOR"].split(":")
    name = manifest["metadata"]["name"]
    assert host == f"{name}-{workers['name']}-0-0.{name}"
    assert container["ports"] == [{"containerPort": int(port)}]

    with socket.socket() as free:
        free.bind(("localhost", 0))
        here = {"COORDINATOR": f"localhost:{free.getsockname()[1]}", "GPUS_PER_POD": "1"}
    run = tmp_path / "run"
    pods = [
        subprocess.Popen(
            [*container["command"], *container["args"]],
            cwd=ROOT,
            env={
                **environment,
                **variables,
                **here,
                "CONFIG": str(CONFIG),
                "RUN_DIR": str(run),
                "JOB_COMPLETION_INDEX": str(index),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(job["completions"])
    ]
    results = finish(pods)
    assert [code for code, _, _ in results] == [0, 0], results
    assert len(read_records(run)) == 20
