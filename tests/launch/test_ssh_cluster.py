"""The cluster `ssh`: which hosts the options name, and how they are reached."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from launch import LaunchError
from launch.agent import protocol
from launch.clusters.ssh import CHANNELS, Cluster, hosts_of
from launch.job.options import Options
from tests.launch.sshd import home, sshds  # noqa: F401  fixtures


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("h1 slots=2\nh2\nh3\n")
    (tmp_path / "workers").write_text("w1\nboth\n")
    (tmp_path / "servers").write_text("both\ns1\n")


def names(**options: object) -> list[str]:
    return [host.name for host in hosts_of(replace(Options(), **options))]


def test_the_hosts_that_the_options_name(files):
    assert names(hostfile="hosts") == ["h1", "h2", "h3"]
    assert names(hosts="a:2,b") == ["a", "b"]
    assert names(hostfile="hosts", include="h1,h3") == ["h1", "h3"]
    assert names(hostfile="hosts", exclude="h1") == ["h2", "h3"]
    found = {host.name: host.roles for host in hosts_of(Options(worker_hostfile="workers", server_hostfile="servers"))}
    assert found.keys() == {"w1", "both", "s1"}
    assert "server" not in found["w1"] and "worker" not in found["s1"]


@pytest.mark.parametrize(
    "options, said",
    [
        ({}, "no hosts given.*-H FILE.*--hosts"),
        ({"hostfile": "hosts", "hosts": "a"}, "-H and --hosts cannot be used together"),
        ({"worker_hostfile": "workers"}, "-WH and -SH need each other"),
        ({"worker_hostfile": "workers", "server_hostfile": "servers", "hosts": "a"}, "remove -H"),
        ({"hostfile": "none"}, "none: no such file"),
    ],
)
def test_wrong_options_are_refused(files, options, said):
    with pytest.raises(LaunchError, match=said) as caught:
        names(**options)
    assert caught.value.code == 2


def test_a_key_that_does_not_exist(files):
    with pytest.raises(LaunchError, match="the key /no/such/key does not exist"):
        Cluster(Options(hostfile="hosts", identity="/no/such/key"))


@pytest.mark.parametrize("ssh", sorted(CHANNELS))
def test_each_way_of_ssh_reaches_the_hosts_of_a_file_as_the_options_say(ssh, sshds, home, tmp_path):  # noqa: F811
    """Three hosts at once, their ports in the file and in --ssh-port, none known before."""
    made = [sshds(known=False) for _ in range(3)]
    lines = [f"h{sshd.port} hostname=127.0.0.1 port={sshd.port}" for sshd in made[1:]]
    (tmp_path / "hosts").write_text("\n".join(["127.0.0.1", *lines]) + "\n")
    asked = Options(hostfile=str(tmp_path / "hosts"), ssh=ssh, ssh_port=made[0].port, identity=str(home.key))
    asked = replace(asked, connect_timeout=120.0)
    if ssh == "paramiko":
        home.key.with_suffix(".pub").unlink()
    refused = Cluster(asked)
    with pytest.raises(LaunchError, match="^127.0.0.1 .*: its host key is not known here"):
        refused.connect(refused.hosts[0], "test")
    refused.close()
    cluster = Cluster(replace(asked, accept_new_host_keys=True))
    with ThreadPoolExecutor(3) as pool:
        opened = list(pool.map(lambda host: cluster.connect(host, "test", timeout=120.0), cluster.hosts))
    assert all(protocol.HELLO in channel.read(120.0) for channel in opened)
    for channel in opened:
        channel.close()
    cluster.close()
    cluster.close()
    assert [sshd.logins for sshd in made] == [1] * 3
