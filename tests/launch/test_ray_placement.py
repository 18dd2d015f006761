"""What a job asks of Ray, without a cluster."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launch import LaunchError
from launch.agent.cores import engines_limit
from launch.clusters.in_ray import relay
from launch.clusters.in_ray.placement import Node, find, inventory, lacking, names, resources, text_of
from launch.clusters.ray import check, hosts_of, merged, request, runtime_env
from launch.job.host import Host
from launch.job.options import Options

NODES = [
    Node("a" * 40, "h10", "10.0.0.10", {"CPU": 4.0, "GPU": 2.0, "memory": 8.0 * 2**30}),
    Node("b" * 40, "h2", "10.0.0.2", {"CPU": 8.0}),
    Node("c" * 40, "twin", "10.0.0.3", {}),
    Node("d" * 40, "twin", "10.0.0.4", {}),
]


def test_resources_are_rays_with_units_for_memory():
    assert resources("CPU=8, gpu=2,memory=16g,fast=0.5") == {"CPU": 8, "GPU": 2, "memory": 16 * 2**30, "fast": 0.5}
    assert resources("GPU=0.5") == {"CPU": 1, "GPU": 0.5}
    assert text_of(resources("memory=512m")) == "CPU=1 memory=512m"


@pytest.mark.parametrize("text", ["", "CPU", "=1", "CPU=-1", "CPU=1,cpu=2", "CPU=4g", "GPU=1.5", "CPU=nan", "a=1,"])
def test_wrong_resources_are_refused(text: str):
    with pytest.raises(LaunchError, match="expected"):
        resources(text)


def test_nodes_have_the_names_of_their_hosts():
    named = names(NODES)
    assert list(named) == ["h2", "h10", "twin-cccccccc", "twin-dddddddd"]
    assert find("10.0.0.2", named) is find("h2", named) is NODES[1]
    with pytest.raises(LaunchError, match="h3 is not a node of the Ray cluster, which has h2, h10, twin-c"):
        find("h3", named)


def test_what_a_cluster_can_never_place():
    assert lacking([{"CPU": 4}] * 2, "STRICT_SPREAD", NODES) == ""
    assert lacking([{"CPU": 4}] * 3, "STRICT_SPREAD", NODES).startswith(
        "only 2 of its nodes can take one of the 3 bundle"
    )
    assert lacking([{"CPU": 4}] * 3, "PACK", NODES) == ""
    assert lacking([{"CPU": 1, "GPU": 3}], "PACK", NODES) == "no node has CPU=1 GPU=3"
    assert inventory(names(NODES[:2]), [{"CPU": 1, "GPU": 3}]) == "h2 (CPU=8 GPU=0), h10 (CPU=4 GPU=2)"
    many = names([replace(NODES[0], host=f"n{number}") for number in range(10)])
    assert inventory(many, [{"CPU": 1}]).endswith("n7 (CPU=4), and 2 more")


def test_a_request_has_a_bundle_for_each_worker_node_or_host():
    options = Options(launcher="ray", num_workers=3)
    assert request(options, []).bundles == [{"CPU": 1.0}] * 3
    assert len(request(replace(options, ray_nodes=2), []).bundles) == 2
    asked = request(replace(options, mode="dry-run"), [Host("h1"), Host("h2")])
    assert (asked.hosts, len(asked.bundles), asked.starts, asked.wait) == (["h1", "h2"], 2, False, 5.0)
    with pytest.raises(LaunchError, match="--ray-nodes and a list of hosts exclude each other"):
        request(replace(options, ray_nodes=2), [Host("h1")])
    with pytest.raises(LaunchError, match="--include and --exclude need hosts"):
        hosts_of(replace(options, exclude="h1"))


def test_a_place_becomes_a_host():
    place = {"name": "h1", "ip": "10.0.0.1", "bundles": [0, 2], "python": "/p", "folder": "/w"}
    assert merged(place, {}, True) == Host("h1", hostname="10.0.0.1", python="/p", workdir="/w", slots=2)
    given = {"10.0.0.1": Host("10.0.0.1", python="/mine", slots=5)}
    assert merged(place, given, True) == Host("h1", hostname="10.0.0.1", python="/mine", workdir="/w", slots=5)


def test_a_runtime_environment_is_json_or_a_file(tmp_path: Path):
    file = tmp_path / "env.yaml"
    file.write_text("pip: [einops]\n")
    assert runtime_env(str(file)) == runtime_env('{"pip": ["einops"]}') == {"pip": ["einops"]}
    for given, said in ((str(tmp_path / "none"), "No such file"), ("{", "neither JSON"), (str(tmp_path), "directory")):
        with pytest.raises(LaunchError, match=f"--ray-runtime-env .*{said}"):
            runtime_env(given)
    file.write_text("- pip\n")
    with pytest.raises(LaunchError, match="expected an object"):
        runtime_env(str(file))


def test_wrong_addresses_and_a_python_without_ray_are_refused():
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        for given, said in (
            (address, f"no Ray cluster at --address {address}: Connection refused; `ray start --head` prints the"),
            ("head", "--address head: expected auto, or HOST:PORT"),
            ("ray://head:10001", "Ray's client is not supported: start the job on a node"),
        ):
            with pytest.raises(LaunchError, match=said):
                check(Options(address=given), installed=lambda name: True)
    with pytest.raises(LaunchError, match=r"Ray is not installed for .*: pip install 'dmltrain\[ray\]'") as missing:
        check(Options(), installed=lambda name: None)
    assert missing.value.code == 127


def test_the_limit_of_an_engine_that_only_counts_cpus():
    assert engines_limit("4 node") == {"engine:node": 4.0}
    assert engines_limit("") == engines_limit("4") == engines_limit("x node") == engines_limit("0 node") == {}


def test_the_relay_prints_what_it_is_told_and_ends_with_its_code():
    name = f"dmltrain-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        argv = [sys.executable, "-I", "-S", relay.__file__, name, '{"hosts": []}']
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(argv, env={"DMLTRAIN_BRIDGE": "s"}, **pipes) as one:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as stream:
                assert json.loads(stream.readline()) == {"hosts": [], "settings": "s"}
                stream.write('{"said": "h1: lost"}\n{"code": 3}\n')
                stream.flush()
                out, _ = one.communicate()
    assert (one.returncode, out) == (3, "h1: lost\n")
    alone = subprocess.run(argv, env={"DMLTRAIN_BRIDGE": "s"}, capture_output=True, text=True)
    assert alone.returncode == 1 and "the program that talks to Ray has ended" in alone.stderr
