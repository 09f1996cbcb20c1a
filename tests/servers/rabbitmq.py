"""RabbitMQ: one node with a name, a port mapper and a folder of its own."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .base import Server, free_port, listens, program

ENOUGH = 0.9
"""The share of the memory of this machine at which a node is to say that it is too much."""


class PortMapper(Server):
    """``epmd``, by which a node and rabbitmqctl find each other.

    Without one of its own the node would start one that stays when it is killed.
    """

    def __init__(self) -> None:
        super().__init__("epmd")
        self.env = {"ERL_EPMD_ADDRESS": "127.0.0.1", "ERL_EPMD_PORT": str(self.port)}
        self.launch([program("epmd", "rabbitmq-server")], lambda: listens(self.port))


class Holder(NamedTuple):
    """A channel that holds messages of a queue, and the port its client comes from; 0: it has gone.

    ``busy`` is where the channel is stuck, if it is in the midst of something.
    """

    queue: str
    messages: int
    channel: str
    port: int
    busy: str


class RabbitMQ(Server):
    """``rabbitmq-server`` without plugins, as durable as it is by default.

    Args:
        lines: further lines of its configuration, such as ``consumer_timeout = 10000``.
        hosts: further addresses of this machine to listen on.
        beside: a node whose cluster it joins, and whose port mapper it uses: close this one first.
    """

    plugins: Sequence[str] = ()
    patience = 240.0  # an idle machine takes 4 s to start it, a busy one has taken over 60 s

    def __init__(
        self, *lines: str, hosts: Sequence[str] = (), beside: RabbitMQ | None = None
    ) -> None:
        self._beside = beside
        self._names = beside._names if beside else PortMapper()
        super().__init__("rabbitmq")
        self.node = f"tidemill{self.port}@localhost"
        listeners = enumerate(["127.0.0.1", *hosts], 1)
        config = [f"listeners.tcp.{number} = {host}:{self.port}" for number, host in listeners]
        config += ["loopback_users = none", f"vm_memory_high_watermark.relative = {ENOUGH}", *lines]
        if beside:
            config += _joining(beside.node)
        (self.path / "rabbitmq.conf").write_text("\n".join(config) + "\n")
        (self.path / "plugins").write_text(f"[{', '.join(self.plugins)}].\n")
        self.cookie = beside.cookie if beside else self.node
        cookie = self.path / ".erlang.cookie"
        cookie.write_text(self.cookie)
        cookie.chmod(0o400)
        here = {
            "HOME": "",
            "RABBITMQ_CONFIG_FILE": "rabbitmq.conf",
            "RABBITMQ_CONF_ENV_FILE": "none",  # nothing of a server that this machine has
            "RABBITMQ_ENABLED_PLUGINS_FILE": "plugins",
            "RABBITMQ_LOG_BASE": "log",
            "RABBITMQ_MNESIA_BASE": "mnesia",
        }
        self.env = {name: str(self.path / file) for name, file in here.items()}
        self.env |= self._names.env | {
            "LC_ALL": "C.UTF-8",
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_NODENAME": self.node,
            # Small: two threads that neither spin nor claim a core, tables for few processes.
            "RABBITMQ_SCHEDULER_BIND_TYPE": "u",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +P 100000 +t 300000"
            " -kernel inet_dist_use_interface {127,0,0,1}",
            # Its script becomes the server itself, rather than to wait for it.
            "RUNNING_UNDER_SYSTEMD": "true",
        }
        self.start()

    @property
    def url(self) -> str:
        """Of its virtual host ``/``."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/%2F"

    def start(self) -> None:
        """Start it, again after a kill: on the same port and data."""
        self.launch([_rabbitmq_program("rabbitmq-server")], self._answers)

    def close(self) -> None:
        """End it and its own port mapper, delete its folder."""
        super().close()
        if self._beside is None:
            self._names.close()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as sock:
                sock.sendall(b"AMQP\x00\x00\x09\x01")
                return sock.recv(1) == b"\x01"  # the first frame of a conversation
        except OSError:
            return False

    def ctl(self, *command: str) -> str:
        """What rabbitmqctl prints for a command. It takes a second, on a busy machine a minute."""
        done = subprocess.run(
            [_rabbitmq_program("rabbitmqctl"), "--quiet", *command],
            check=True,
            capture_output=True,
            text=True,
            timeout=self.patience,
            cwd=self.path,
            env={**os.environ, **self.env},
        )
        return done.stdout.strip()

    def eval(self, *expressions: str) -> str:
        """Have it evaluate Erlang; what that printed. It takes a hundredth of ``ctl``."""
        call = [program("erl_call", "erlang-base"), "-sname", self.node, "-c", self.cookie, "-r"]
        until = time.monotonic() + self.patience
        while True:
            done = subprocess.run(
                [*call, "-fetch_stdout", "-e"],
                input=", ".join((*expressions, "done.\n")),
                check=False,
                capture_output=True,
                text=True,
                timeout=60,
                env={**os.environ, **self.env},
            )
            printed, ended, rest = done.stdout.rpartition("{ok, done}")
            if ended:
                return printed.strip()
            # erl_call gives up at once when a busy node does not answer its greeting in time.
            again = done.returncode and not done.stdout and time.monotonic() < until
            assert again, f"{expressions}: {rest}{done.stderr}"

    def alarm(self, on: bool) -> None:
        """Let it complain of too little memory: it reads nothing more from those who publish."""
        share = 0.0000001 if on else ENOUGH
        self.eval(f"ok = vm_memory_monitor:set_vm_memory_high_watermark({share:.7f})")

    def queues(self) -> dict[str, dict[str, int]]:
        """By name: how many messages there are, ready and not yet acked, and how many consumers."""
        told = "name, messages, messages_ready, messages_unacknowledged, consumers"
        rows = self.eval(
            f'Told = rabbit_amqqueue:info_all(<<"/">>, [{told}])',
            "Rows = [[{name, Name} | Row] || [{name, {resource, _, queue, Name}} | Row] <- Told]",
            "io:put_chars(rabbit_json:encode([maps:from_list(Row) || Row <- Rows]))",
        )
        return {row.pop("name"): row for row in json.loads(rows)}

    def counts(self) -> dict[str, int]:
        """By name: how many messages a quorum queue has at this moment, ready or in hand."""
        rows = self.eval(
            "Count = fun(Queue) -> case ra:local_query({Queue, node()},"
            " fun rabbit_fifo:query_messages_total/1, 5000) of"
            " {ok, {_, Total}, _} -> Total; _ -> 0 end end",
            "io:put_chars(rabbit_json:encode(maps:from_list([{Name, Count(Queue)} ||"
            " {Queue, _} <- ets:tab2list(ra_state),"
            ' <<"%2F_", Name/binary>> <- [atom_to_binary(Queue)]])))',
        )
        counts: dict[str, int] = json.loads(rows)
        return counts

    def holders(self) -> list[Holder]:
        """Who holds messages of quorum queues that are not acknowledged."""
        rows = self.eval(
            "Lines = maps:from_list([{Pid, proplists:get_value(peer_port, Told, 0)}"
            " || {Pid, Told} <- ets:tab2list(connection_created)])",
            "Line = fun(Channel) -> case ets:lookup(channel_created, Channel) of"
            " [{_, Told}] -> maps:get(proplists:get_value(connection, Told), Lines, 0);"
            " [] -> 0 end end",
            # where a process is that does not wait for what comes next
            "Busy = fun(Pid) -> case process_info(Pid, current_stacktrace) of"
            " {_, [{gen_server2, _, _, _} | _]} -> <<>>;"
            ' {_, Frames} -> iolist_to_binary(lists:join(<<" < ">>,'
            ' [io_lib:format("~s:~s", [M, F]) || {M, F, _, _} <- Frames]));'
            ' undefined -> <<"it is gone">> end end',
            # by {tag, channel}; of what the server keeps of each only one map has numbers for keys
            "Found = fun(Queue) -> case ra:local_query({Queue, node()}, fun(S) ->"
            " [{Channel, map_size(M)} || Whole <- tuple_to_list(S), is_map(Whole),"
            " {{_, Channel}, Kept} <- maps:to_list(Whole), is_pid(Channel), is_tuple(Kept),"
            " M <- tuple_to_list(Kept), is_map(M), map_size(M) > 0,"
            " is_integer(hd(maps:keys(M)))] end, 5000) of"
            " {ok, {_, Has}, _} -> Has; _ -> [] end end",
            "Rows = [#{queue => Name, messages => Count, port => Line(Channel),"
            " channel => list_to_binary(pid_to_list(Channel)), busy => Busy(Channel)} ||"
            " {resource, _, queue, Name} <- [amqqueue:get_name(Q) ||"
            " Q <- rabbit_amqqueue:list(), amqqueue:get_type(Q) =:= rabbit_quorum_queue],"
            ' Queue <- [binary_to_atom(<<"%2F_", Name/binary>>)],'
            " {Channel, Count} <- Found(Queue)]",
            "io:put_chars(rabbit_json:encode(Rows))",
        )
        return [Holder(**row) for row in json.loads(rows)]

    def leaderless(self) -> list[str]:
        """The quorum queues that this node does not lead; on a single node, they answer nobody."""
        rows = self.eval(
            "States = [{atom_to_binary(Name), State} || {Name, State} <- ets:tab2list(ra_state)]",
            "io:put_chars(rabbit_json:encode([Name ||"
            ' {<<"%2F_", Name/binary>>, State} <- States, State =/= leader]))',
        )
        return sorted(json.loads(rows))

    def sync(self) -> None:
        """Until its list of queues is on disk.

        The messages it confirmed are, but a queue declared less than 3 s before a kill may be
        unknown afterwards, with all that is in it, or known and out of reach for ever.
        """
        self.eval("[dets:sync(Table) || Table <- dets:all()]", "mnesia:sync_log()")

    def delete_queue(self, name: str) -> None:
        """With all that is in it."""
        self.ctl("delete_queue", name)


def _joining(node: str) -> list[str]:
    """The lines by which a node joins the cluster of another when it starts for the first time."""
    return [
        "cluster_formation.peer_discovery_backend = classic_config",
        f"cluster_formation.classic_config.nodes.1 = {node}",
        "cluster_formation.randomized_startup_delay_range.min = 0",
        "cluster_formation.randomized_startup_delay_range.max = 0",
    ]


def _rabbitmq_program(name: str) -> str:
    """Of Debian's programs on the path, those that change to a user of their own are of no use."""
    inner = Path("/usr/lib/rabbitmq/bin") / name
    return str(inner) if inner.exists() else program(name, "rabbitmq-server")


def rabbitmq_url() -> str:
    """Of the RabbitMQ that tests share which do not kill it."""
    return os.environ.get("TIDEMILL_TEST_RABBITMQ") or _shared_rabbitmq().url


@functools.cache
def _shared_rabbitmq() -> RabbitMQ:
    return RabbitMQ()
