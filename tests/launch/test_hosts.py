"""Lists of hosts: the lines of a hosts file, YAML inventories, --hosts, --include and --exclude, -WH and -SH."""

import os
import queue
import re
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmltrain_launch import LaunchError
from dmltrain_launch.job import hosts
from dmltrain_launch.job.host import Host
from dmltrain_launch.job.hosts import MOST_BYTES, from_list, parse, read
from dmltrain_launch.job.hosts.attribute import ATTRIBUTES
from dmltrain_launch.job.hosts.range import MOST, expand, split_list
from dmltrain_launch.job.hosts.selection import select
from dmltrain_launch.job.role import SCHEDULER, SERVER, WORKER
from dmltrain_launch.run import watch
from dmltrain_launch.run.supervisor.event import Unlisted
from dmltrain_launch.run.watch import HostsWatch
from tests.launch.refusal import refusal

EXAMPLE = Path(__file__).parents[2] / "hosts.example"


def text(content: str) -> list[Host]:
    return parse(content.encode(), "hosts")


def inventory(content: str) -> list[Host]:
    return parse(textwrap.dedent(content).encode(), "hosts.yaml")


def names(hosts: list[Host]) -> list[str]:
    return [host.name for host in hosts]


# -- lines


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("h1", Host("h1")),
        ("DOM\\\\anna@h1:22", Host("h1", user="DOM\\anna", port=22)),
        ("10.0.0.7:2222", Host("10.0.0.7", port=2222)),
        ("[2001:db8::1]:2222", Host("2001:db8::1", port=2222)),
        ("[2001:db8::1]", Host("2001:db8::1")),
        ("2001:db8::1", Host("2001:db8::1")),
        ("h1 slots=4 max_slots=8", Host("h1", slots=4)),
        ("h1 max_slots=8", Host("h1", slots=8)),
        ("h1 max-slots=8", Host("h1", slots=8)),
        ("h1 python=python3.11", Host("h1", python="python3.11")),
        ("  h1\tslots=4   # four", Host("h1", slots=4)),
        ("h1 addr=2001:DB8::1", Host("h1", "2001:db8::1")),
        ("h1 addr=[2001:db8::1]", Host("h1", "2001:db8::1")),
        ("h1 interface=eth1.100", Host("h1", interface="eth1.100")),
        ("h1 hostname=h1.example.org user=anna port=4", Host("h1", hostname="h1.example.org", user="anna", port=4)),
        ("anna@h1:2222 user=anna port=2222", Host("h1", user="anna", port=2222)),
        ("h1 python='/my python/bin/python'", Host("h1", python="/my python/bin/python")),
        ("h1 workdir=/data/my\\ project", Host("h1", workdir="/data/my project")),
        ("h1 gpus=0-2,7", Host("h1", gpus=("0", "1", "2", "7"))),
        ("h1 gpus=GPU-8932f937-d72c", Host("h1", gpus=("GPU-8932f937-d72c",))),
        ("h1 roles=worker,server,scheduler", Host("h1", roles=(SCHEDULER, SERVER, WORKER))),
        ("h1 roles=worker", Host("h1", roles=(WORKER,))),
        ("h1 env.A=1 env.B='x #y' env.C=", Host("h1", environment=(("A", "1"), ("B", "x #y"), ("C", "")))),
        ('h1 env.A=a#b env.B="it\'s $HOME"', Host("h1", environment=(("A", "a#b"), ("B", "it's $HOME")))),
        ("h1 env.A=b=c", Host("h1", environment=(("A", "b=c"),))),
    ],
)
def test_a_line_of_a_hosts_file(line, expected):
    found = text(line)
    assert found == [Host(**{**vars(expected), "where": "hosts:1"})]


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_the_example_of_each_attribute_is_one(name):
    """Errors show it."""
    (host,) = text(f"h1 {name}={ATTRIBUTES[name].example}")
    assert host != Host("h1", where="hosts:1")


def test_comments_and_blank_lines_are_nothing_and_lines_keep_their_numbers():
    found = text("# the lab\n\n   \nh1 # the first\n   # indented\nh2 slots=2\n")
    assert [(host.name, host.slots, host.where) for host in found] == [("h1", None, "hosts:4"), ("h2", 2, "hosts:6")]


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfh1 slots=2\nh2\n", b"h1 slots=2\r\nh2\r\n", b"h1 slots=2\rh2\r"])
@pytest.mark.parametrize("bad", [b"\xff", b"h4 \x80", b"\xc3(", b"h4\0", b"h4 \x1b[0m", b"h4 slots=two", b"h4 'open"])
def test_files_of_other_systems_read_the_same_and_their_lines_have_the_same_numbers(content, bad):
    assert parse(content, "hosts") == [Host("h1", slots=2, where="hosts:1"), Host("h2", where="hosts:2")]
    assert refusal(parse, content + bad, "hosts").startswith("hosts:3: ")


def test_ranges_and_those_in_addr_and_hostname_go_in_step_with_the_name():
    assert names(text("node[01-03]")) == ["node01", "node02", "node03"]
    assert names(text("n[1,3,5-7]")) == ["n1", "n3", "n5", "n6", "n7"]
    assert names(text("n[8-11]-ib.lab")) == ["n8-ib.lab", "n9-ib.lab", "n10-ib.lab", "n11-ib.lab"]
    assert names(text("r[1-2]n[07,10]")) == ["r1n07", "r1n10", "r2n07", "r2n10"]
    assert names(text("10.0.0.[9-10]")) == ["10.0.0.9", "10.0.0.10"]
    assert [(host.user, host.port, host.slots) for host in text("anna@n[1-2]:2222 slots=3")] == [("anna", 2222, 3)] * 2
    found = text("n[1-3] addr=10.0.0.[11-13] hostname=n[1-3].lab")
    expected = [(f"n{number}", f"10.0.0.1{number}", f"n{number}.lab") for number in (1, 2, 3)]
    assert [(host.name, host.address, host.hostname) for host in found] == expected


@given(
    st.text("abcxyz-.", max_size=5),
    st.lists(st.integers(0, 9999), min_size=1, max_size=5, unique=True),
    st.integers(0, 6),
    st.text("abcxyz-.", max_size=5),
)
def test_ranges_round_trip(prefix, numbers, width, suffix):
    written = [f"{number:0{width}d}" for number in numbers]
    assert expand(f"{prefix}[{','.join(written)}]{suffix}") == [f"{prefix}{each}{suffix}" for each in written]


@given(st.integers(0, 9999), st.integers(0, 99), st.sampled_from([0, 5, 6]))
def test_a_range_has_every_number_once_as_wide_as_it_is_written(first, more, width):
    low, high = f"{first:0{width}d}", f"{first + more:0{width}d}"
    assert expand(f"n[{low}-{high}]") == [f"n{number:0{width}d}" for number in range(first, first + more + 1)]


@given(st.lists(st.sampled_from(["a", "n[1,3]", "b:2", "r[1-2]n[3,4,5]"]), min_size=1))
def test_a_list_is_split_outside_of_ranges(parts):
    assert split_list(",".join(parts)) == parts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("h1 slot=4", "unknown attribute 'slot': did you mean slots?"),
        ("h1 Slots=4", "unknown attribute 'Slots': did you mean slots?"),
        ("h1 zzz=4", "unknown attribute 'zzz': expected slots, max_slots"),
        ("h1 h2", "h2: expected ATTRIBUTE=VALUE without spaces, such as slots=4; one host per line"),
        ("h1 slots = 4", "slots: expected ATTRIBUTE=VALUE without spaces"),
        ("h1 slots=4 slots=4", "slots= is given twice"),
        ("h1 slots=0", "slots=0: expected a whole number, 1 or more"),
        ("h1 slots=-1", "slots=-1: expected a whole number, 1 or more"),
        ("h1 slots=", "slots=: expected a whole number"),
        ("h1 slots=4 max_slots=2", "max_slots=2 is less than slots=4"),
        ("h1 max-slots=x", "max-slots=x: expected a whole number"),
        ("h1:4", "h1:4: 4 would be sshd's port; for slots write h1 slots=4"),
        ("h1:x", "port=x: expected the port of its sshd, 1 to 65535"),
        ("h1:65536", "port=65536: expected the port"),
        ("h1:", "h1:: the number after the : is missing"),
        ("h1 port=0", "port=0: expected the port"),
        ("h1:22 port=2222", "port is given twice: 22 with the name, and port=2222"),
        ("anna@h1 user=bob", "user is given twice: anna with the name, and user=bob"),
        ("@h1", "@h1: the user name before the @ is missing"),
        ("-anna@h1", "user=-anna: expected the name of a user"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is not a host name"),
        ("h1#x", "; a comment needs"),
        ("h1,h2", "; one host per line"),
        ("[fe80::g]:22", "[fe80::g] is not an IP address"),
        ("h1 addr=h1.lab", "addr=h1.lab: expected an IP address such as 10.0.0.1, because ps-lite cannot bind names"),
        ("h1 addr=10.0.0.256", "addr=10.0.0.256: expected an IP address"),
        ("h1 addr=0.0.0.0", "addr=0.0.0.0: expected the address of one machine"),
        ("n[1-2] addr=10.0.0.1", "addr=10.0.0.1: n[1-2] stands for 2 hosts, but this has 1; expected a range"),
        ("h1 hostname=-x", "hostname=-x: '-x' is not a host name"),
        ("h1 interface=a/b", "interface=a/b: expected the name of a network interface"),
        ("h1 interface=0123456789abcdef", "expected the name of a network interface"),
        ("h1 roles=worker,sever", "roles=worker,sever: unknown role 'sever': did you mean server?"),
        ("h1 roles=", "unknown role ''"),
        ("h1 gpus=", "gpus=: expected numbers of devices"),
        ("h1 gpus=0;2", "gpus=0;2: expected numbers of devices, such as 0,2 or 0-3"),
        ("h1 gpus=0,0", "gpus=0,0: a device is named twice"),
        ("h1 gpus=3-1", "gpus=3-1: [3-1]: 3 is greater than 1"),
        ("h1 python=~/bin/python", "python=~/bin/python: expected a command"),
        ("h1 workdir=project", "workdir=project: expected a path that starts with /"),
        ("h1 env.1A=x", "env.1A: expected the name of an environment variable"),
        ("h1 env.=x", "env.: expected the name of an environment variable"),
        ("h1 env.DMLC_ROLE=worker", "env.DMLC_ROLE: the launcher sets DMLC_ROLE for every process"),
        ("h1 env.A='x", "unclosed quote"),
        ("h1 env.A=x\\", "backslash at the end of the line"),
        ("n[1-3", "n[1-3: unbalanced bracket; a range is written node[01-08]"),
        ("n[a-c]", "[a-c] is not a range: expected numbers"),
        ("n[]", "[] is not a range"),
        ("n[3-1]", "[3-1]: 3 is greater than 1; write the smaller number first"),
        ("n[01-100]", "[01-100]: 01 and 100 differ in width"),
        ("n[0-999999999999]", f"stands for more than {MOST} names"),
        ("n[1-200]x[1-200]", f"stands for more than {MOST} names"),
        ("- h1", "- looks like YAML; the name of a YAML inventory must end in .yaml"),
    ],
)
def test_errors_in_a_line_have_its_number(line, message):
    said = refusal(text, f"# hosts\nh0\n{line}\n")
    assert said.startswith("hosts:3: ")
    assert message in said


def test_a_host_that_comes_twice_is_named_with_both_lines():
    assert refusal(text, "h1\nh2\n\nH1 slots=2").startswith("hosts:4: H1 is already given at hosts:1; ")
    assert refusal(text, "n[1-3]\nn2").startswith("hosts:2: n2 is already given at hosts:1; ")
    assert names(text("a hostname=h1 port=2201\nb hostname=h1 port=2202")) == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "slots"),
    [
        ("h1\nh1\nh2\nh2\n", {"h1": 2, "h2": 2}),  # PBS_NODEFILE
        ("h1\nh2\n# and again\n\nh1\nh1", {"h1": 3, "h2": 1}),
        ("h1 slots=2\nh2 slots=4\nh1 slots=1", {"h1": 3, "h2": 4}),  # Open MPI
        ("h1\nh2", {"h1": None, "h2": None}),
    ],
)
def test_a_line_for_each_slot(content, slots):
    assert {host.name: host.slots for host in text(content)} == slots


@pytest.mark.parametrize("content", ["h1\nh1 user=anna", "h1 port=22\nh1 port=22", "h1\nh1 slots=2", "n[1-2]\nn1"])
def test_lines_that_say_more_than_a_slot_are_no_list_of_slots(content):
    assert "is already given at hosts:1" in refusal(text, content)


@pytest.mark.parametrize("setting", ["env.1A=hush", "env.RANK=hush", "env.A=hush env.A=hush", "env.A='hush"])
def test_an_error_never_repeats_the_value_of_a_variable(setting):
    assert "hush" not in refusal(text, f"h1 {setting}")


# -- files


def test_a_file_is_read_and_named_as_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("h1\nh2\n")
    assert [host.where for host in read("hosts")] == ["hosts:1", "hosts:2"]
    Path("lab.YML").write_text("- h1\n")
    assert read(Path("lab.YML")) == [Host("h1", where="lab.YML:1")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "hosts: no hosts; expected one per line"),
        (b"# none\n\n", "hosts: no hosts"),
        (b"\xef\xbb\xbf", "hosts: no hosts"),
        (b"h1\nh\xfc2\n", "hosts:2: byte 0xfc is not UTF-8"),
        (b"\xef\xbb\xbfh1\n\xff", "hosts:2: byte 0xff is not UTF-8"),
        (b"h1\n\x7fELF\x02\x01\x00\n", "hosts:2: binary data"),
        ("h1\n".encode("utf-16"), "hosts is UTF-16"),
        (b"h1\n" * (MOST_BYTES // 3 + 1), "hosts is larger than 1 MiB"),
    ],
)
def test_what_is_no_hosts_file(content, message):
    assert refusal(parse, content, "hosts").startswith(message)


def test_a_file_that_cannot_be_read(tmp_path):
    assert refusal(read, tmp_path / "none").startswith(f"{tmp_path}/none: no such file")
    assert refusal(read, tmp_path).startswith(f"{tmp_path} is a folder")
    assert "cannot be read: Not a directory" in refusal(read, "/dev/null/hosts")
    assert "cannot be read: embedded null byte" in refusal(read, "a\0b")
    assert refusal(read, "/dev/zero").startswith("/dev/zero is larger than 1 MiB"), "it has no end"
    if os.geteuid() != 0:  # root reads everything
        (tmp_path / "closed").touch(mode=0)
        assert "cannot be read: Permission denied" in refusal(read, tmp_path / "closed")


# -- YAML


def test_an_inventory():
    found = inventory("""
        defaults: {user: anna, slots: 2, env: {A: yes, B: default}}
        hosts:
          - node[01-02] env.B='of the line'
          - bob@n3:2222
          - name: n[4-5]
            addr: 10.0.0.[4-5]
            gpus: [0, 2]
            roles: worker,server
            slots: 4
            env:
              B: 010
              C: ''
          - {name: "2001:db8::1", roles: [server], gpus: 0-1, env.D: "two\\nlines"}
    """)
    env = (("A", "yes"), ("B", "default"))
    four = {"user": "anna", "slots": 4, "gpus": ("0", "2"), "roles": (SERVER, WORKER), "where": "hosts.yaml:6"}
    four["environment"] = (("A", "yes"), ("B", "010"), ("C", ""))
    line = {"user": "anna", "slots": 2, "environment": (("A", "yes"), ("B", "of the line")), "where": "hosts.yaml:4"}
    last = {"user": "anna", "slots": 2, "gpus": ("0", "1"), "roles": (SERVER,), "where": "hosts.yaml:14"}
    assert found == [
        *(Host("node01", **line), Host("node02", **line)),
        Host("n3", user="bob", port=2222, slots=2, environment=env, where="hosts.yaml:5"),
        *(Host("n4", "10.0.0.4", **four), Host("n5", "10.0.0.5", **four)),
        Host("2001:db8::1", environment=(*env, ("D", "two\nlines")), **last),
    ]
    assert names(inventory("- h1 slots=2 # two\n- {name: h2}\n")) == ["h1", "h2"], "it may be a list alone"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "hosts.yaml: no hosts"),
        ("hosts: []", "hosts.yaml: no hosts"),
        ("h1\n", "hosts.yaml:1: expected a list of hosts, or a mapping with hosts: and optionally defaults:"),
        ("hosts:\n  h1: {}\n", "hosts.yaml:2: expected a list of hosts"),
        ("defaults: {}\n", "hosts.yaml:1: hosts: is missing"),
        ("host: [h1]\n", "hosts.yaml:1: unknown key 'host': did you mean hosts?"),
        ("- h1\n- [h2]\n", "hosts.yaml:2: expected a host"),
        ("- h1\n-\n", "hosts.yaml:2: expected a host"),
        ("- h1\n- slots: 2\n", "hosts.yaml:2: name: is missing"),
        ("- h1\n- name: h2\n  slot: 2\n", "hosts.yaml:3: unknown attribute 'slot': did you mean slots?"),
        ("- h1\n- name: h2\n  slots: x\n", "hosts.yaml:3: slots=x: expected a whole number"),
        ("- h1\n- name: h2\n  slots: [2]\n", "hosts.yaml:3: slots: expected one value, such as 4"),
        ("- h1\n- name: h2\n  slots:\n", "hosts.yaml:3: slots: has no value"),
        ("- h1\n- name: h2\n  gpus: [[0]]\n", "hosts.yaml:3: gpus: expected one value, such as 0,2"),
        ("- name: h1\n  env: A=b\n", "hosts.yaml:2: env: expected a mapping"),
        ("- name: h1\n  env:\n    RANK: 1\n", "hosts.yaml:3: env.RANK: the launcher sets RANK"),
        ("- name: h1\n  env:\n    A: {}\n", "hosts.yaml:3: env.A: expected one value"),
        ('- name: h1\n  env: {A: "\\0"}\n', "hosts.yaml:2: env.A: an environment variable cannot contain a NUL"),
        ('- name: h1\n  workdir: "/a\\nb"\n', "hosts.yaml:2: workdir='/a\\nb' contains a control character"),
        ('- name: "[::1]:2\\n2"\n', "hosts.yaml:1: port='2\\n2' contains a control character"),
        ("- name: h1\n  slots: 1\n  slots: 2\n", "hosts.yaml:3: slots: is already given at hosts.yaml:2"),
        ("- name: h1\n  [a]: 2\n", "hosts.yaml:2: expected the name of an attribute"),
        ("- h1\n- h2\n- name: h1\n", "hosts.yaml:3: h1 is already given at hosts.yaml:1"),
        ("defaults:\n  addr: 10.0.0.1\nhosts: [h1]\n", "hosts.yaml:2: defaults: addr must differ between hosts"),
        ("defaults:\n  slot: 1\nhosts: [h1]\n", "hosts.yaml:2: unknown attribute 'slot': did you mean slots?"),
        ("defaults:\n  slots: x\nhosts: [h1]\n", "hosts.yaml:2: slots=x: expected"),
        ("defaults: 3\nhosts: [h1]\n", "hosts.yaml:1: defaults: expected a mapping"),
        ("- h1\n- 'h2\n", "hosts.yaml:3: invalid YAML: while scanning a quoted scalar"),
        ("- h1\n\t- h2\n", "hosts.yaml:2: invalid YAML: while scanning"),
        ("- {name: node[01-08]}\n", "hosts.yaml:1: invalid YAML: while parsing a flow mapping"),
        ("- h1\n--- \n- h2\n", "hosts.yaml:2: invalid YAML: expected a single document"),
        ("- *h1\n", "hosts.yaml:1: invalid YAML: found undefined alias"),
        ("- &a [*a]\n", "hosts.yaml:1: expected a host"),
        ("- !!python/object/apply:os.abort []\n", "hosts.yaml:1: expected a host"),
        ("[" * 1000, "hosts.yaml: nested too deeply"),
    ],
)
def test_errors_in_an_inventory_have_the_line(content, message):
    said = refusal(parse, content.encode(), "hosts.yaml")
    assert said.startswith(message)


# -- the command line


def test_hosts_of_the_command_line_have_slots():
    found = from_list("a:2, anna@b,n[1,3]:4,[2001:db8::1]:2")
    rows = [("a", "", 2), ("b", "anna", None), ("n1", "", 4), ("n3", "", 4), ("2001:db8::1", "", 2)]
    assert [(host.name, host.user, host.slots) for host in found] == rows
    assert {(host.port, host.where) for host in found} == {(0, "--hosts")}


@pytest.mark.parametrize(
    ("given_text", "message"),
    [
        ("", "no hosts; expected --hosts h1:2,h2:2"),
        ("a,,b", "--hosts a,,b: a name is missing"),
        ("a,", "--hosts a,: a name is missing"),
        ("a:x", "slots=x: expected a whole number, 1 or more"),
        ("a:0", "slots=0: expected"),
        ("a,b,a", "a is given twice; for two slots write a:2"),
        ("a slots=2", "'a slots=2' is not a host name"),
        ("n[1-", "n[1-: unbalanced bracket"),
    ],
)
def test_what_is_wrong_with_hosts_of_the_command_line(given_text, message):
    said = refusal(from_list, given_text)
    assert said.startswith("--hosts") and message in said


# -- --include and --exclude

LAB = "h1\nnode[01-04] slots=2\ngpu1 gpus=0,2,5\nworker-[0-1] slots=4\n[2001:db8::1]"


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", "h1 node01 node02 node03 node04 gpu1 worker-0 worker-1 2001:db8::1"),
        ("node[02-03],h1", "", "h1 node02 node03"),
        ("node*", "node01,node0[3-4]", "node02"),
        ("?1,GPU1", "", "h1 gpu1"),
        ("*-[0-1],[2001:db8::1]", "worker-0", "worker-1 2001:db8::1"),
        ("h1@gpu1", "", "h1 gpu1"),
    ],
)
def test_hosts_are_selected_in_the_order_of_the_file(include, exclude, expected):
    assert names(select(text(LAB), include, exclude)) == expected.split()


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("worker-0@worker-1:0,2", "", [("worker-0", 4, ()), ("worker-1", 2, ("0", "2"))]),
        ("worker-*", "worker-1:0", [("worker-0", 4, ()), ("worker-1", 3, ("1", "2", "3"))]),
        ("worker-*", "worker-1:0,1,2,3", [("worker-0", 4, ())]),
        ("gpu1:2,5", "", [("gpu1", None, ("2", "5"))]),
        ("h1:3", "", [("h1", None, ("3",))]),
    ],
)
def test_gpus_are_selected_as_deepspeed_writes_them(include, exclude, expected):
    found = select(text(LAB), include, exclude)
    assert [(host.name, host.slots, host.gpus) for host in found] == expected


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("node09", "", "--include node09: no host with that name; did you mean node0"),
        ("", "zzz", "--exclude zzz: no host with that name; the hosts are h1, node01"),
        ("h1,zz*", "", "--include zz*: no host with that name"),
        ("h1,", "", "--include h1,: a name is missing"),
        ("h1@", "", "--include h1@: a name is missing"),
        ("h1:x", "", "--include h1:x: expected DeepSpeed's syntax h1@h2:0,2"),
        ("h1,gpu1:0", "", "--include h1,gpu1:0: expected DeepSpeed's"),
        ("n[1", "", "--include n[1: n[1: unbalanced bracket"),
        ("gpu1:1", "", "--include gpu1:1: no gpu 1 on gpu1: it has gpus 0,2,5 (hosts:3)"),
        ("", "h1:0", "--exclude h1:0: no gpu 0 on h1: it has neither gpus= nor slots= (hosts:1)"),
        ("", "*[0-9],2001*", "--exclude *[0-9],2001* excludes every host: h1, node01"),
    ],
)
def test_unknown_hosts_in_a_selection_are_refused(include, exclude, message):
    assert refusal(select, text(LAB), include, exclude).startswith(message)


# -- -WH and -SH


def test_worker_and_server_hosts_from_two_files():
    workers, servers = parse(b"a\nb slots=2\nc", "workers"), parse(b"d\nc addr=10.0.0.3", "servers")
    assert hosts.by_roles(workers, servers) == [
        Host("a", roles=(WORKER,), where="workers:1"),
        Host("b", slots=2, roles=(WORKER,), where="workers:2"),
        Host("c", "10.0.0.3", roles=(SERVER, WORKER), where="workers:3, servers:2"),
        Host("d", roles=(SCHEDULER, SERVER), where="servers:1"),
    ]


@pytest.mark.parametrize(
    ("workers", "servers", "message"),
    [
        (b"a slots=2", b"b\na slots=1", "servers:2: a is in both files, and its slots differs from that at workers:1"),
        (b"a", b"b roles=server", "servers:1: b has roles=, but -SH already sets its role"),
        (b"a", b"", "-SH: no hosts"),
    ],
)
def test_two_files_that_disagree_about_a_host(workers, servers, message):
    servers_hosts = parse(servers, "servers") if servers else []
    assert refusal(hosts.by_roles, parse(workers, "workers"), servers_hosts).startswith(message)


# -- whatever comes

WORDS = ("slots=2", "addr=", "n[1-3]", "env.A=", "hosts:", "name: ", "\u2028", "é")
ALPHABET = st.sampled_from([*"h1 \t\n\r#='\"\\@:[],-.*{}&!|>%~\0", *WORDS])
ANYTHING = st.one_of(st.text(), st.lists(ALPHABET).map("".join))


@given(ANYTHING, ANYTHING)
def test_any_option_gives_hosts_or_a_refusal(one, two):
    try:
        assert from_list(one)
    except LaunchError as error:
        assert str(error).startswith("--hosts")
    try:
        assert select(text(LAB), one, two)
    except LaunchError as error:
        assert str(error).startswith(("--include", "--exclude"))


# -- hosts.example


def test_the_example_is_a_hosts_file_that_shows_every_attribute():
    content = EXAMPLE.read_text()
    hosts = read(EXAMPLE)
    assert {"n1", "2001:db8::4", "node08", "rack3-n7", "m4"} <= set(names(hosts))
    code = "\n".join(line for line in content.splitlines() if not line.startswith("#"))
    assert [name for name in [*ATTRIBUTES, "env.NCCL_DEBUG"] if f" {name}=" not in code] == []
    told = {name for host in hosts for name, value in vars(host).items() if value not in ("", (), 0, None)}
    found_out = {"machine"}  # by the host's agent
    assert told == set(vars(Host(""))) - found_out  # every field of a host comes to have a value


def test_the_inventory_in_the_example_reads():
    block = re.search(r"^#   defaults:.*?(?=^#\n)", EXAMPLE.read_text(), re.MULTILINE | re.DOTALL)[0]
    found = inventory("\n".join(line.removeprefix("#") for line in block.splitlines()))
    assert (len(found), found[0].user, found[8].gpus) == (9, "anna", ("0", "2"))


# -- the hosts file of a running job is watched ------------------------------------------------------------------------


@pytest.fixture
def events(tmp_path, monkeypatch):
    """What the watch reports about `hosts` in this folder."""
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.02)
    found: queue.SimpleQueue = queue.SimpleQueue()
    file = tmp_path / "hosts"
    file.write_text("h1\nh2\n")
    made = HostsWatch([str(file)], lambda: hosts.read(file), found.put)
    yield found
    made.close()
    with pytest.raises(queue.Empty):
        found.get_nowait()


def test_each_change_is_reported_once(tmp_path, events):
    file = tmp_path / "hosts"
    file.write_text("h1\nh2\nh3 slots=2\n")
    found = events.get(timeout=60)
    assert names(found.hosts) == ["h1", "h2", "h3"] and found.hosts[2].slots == 2
    (tmp_path / "new").write_text("h1\nh4\n")
    (tmp_path / "new").rename(file)
    assert names(events.get(timeout=60).hosts) == ["h1", "h4"], "also a file that takes its place"


def test_a_file_that_is_broken_or_gone_is_reported_and_the_next_one_is_read(tmp_path, events):
    file = tmp_path / "hosts"
    file.write_text("h1 slots=many\n")
    found = events.get(timeout=60)
    assert isinstance(found, Unlisted) and "hosts:1" in found.message and "many" in found.message
    file.unlink()
    assert "no such file" in events.get(timeout=60).message
    file.write_text("h7\n")
    assert names(events.get(timeout=60).hosts) == ["h7"]
