"""What the files in launch/ start, as it stands, where there is no cluster."""

import os
import socket
import stat
import subprocess
import sys

import pytest
import yaml

from fwpkm_jax.training.checkpoints.restore import checkpoint_steps
from tests.training import mesh_flags
from tests.training.conftest import read_records
from tests.training.processes import CONFIG, ROOT, finish

pytestmark = pytest.mark.slow

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


def job_with_a_free_port():
    """A job number from which JAX's Slurm support makes a port that is free here."""
    for number in range(os.getpid() % 4096, 2 * 4096):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", number % 4096 + 61440)):
                return str(number)
    raise AssertionError("no free port")


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


def test_the_jobsets_pods_train_together(tmp_path, environment):
    manifest = yaml.safe_load((ROOT / "launch" / "jobset.yaml").read_text())
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
