"""What a policy does with its shell and its Python harms no other, and nothing of it is left."""

import asyncio
import os
from collections.abc import Awaitable
from string import Template

import psutil
import pytest

from antiphon.core.messages import Ended, Reply, ToolCall
from antiphon.environments.scoring.conversations import ConversationPool
from antiphon.environments.scoring.messages import Failed, ScoringTask
from antiphon.environments.scoring.tool_processes import MOST_WRITTEN, OUTPUT_BYTES, PROCESSES
from tests.support.attempts import outside
from tests.support.bubblewrap import needs_bubblewrap
from tests.support.talking import FACTORY, FOLDER, Talking

DEADLINE_S, ANSWER_S = 240.0, 3.0
LONG_S = 10**9 + os.getpid()
"""How long attacks sleep: no other test on this machine does so for as long."""
KEY = "train-0-7"
IN_THE_SHELL = {
    "writes outside": "echo x > $folder/x || echo x > /x || echo x > /usr/x || echo x > /tmp/x",
    "removes outside": "rm -rf $folder / 2>/dev/null; ls /usr/bin | wc -l",
    "reads a file": "cat $secret",
    "reads the environment's code": f"cat {FOLDER}/*.py | head -c 10 | grep .",
    "reads secrets": "env | grep -i -e canary -e judge",
    "reads other processes": "cat /proc/*/environ /proc/*/cmdline",
    "mounts": "mount -t proc proc /scratch || mount -t tmpfs x /usr",
    "leaves its namespace": "unshare -Ur true || nsenter -t 1 -m true || chroot / true",
    "kills others": "kill -9 $pid || kill -9 -1; kill -9 1; kill -STOP 1; echo still",
    "calls out": (
        "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", $port))' || "
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"$socket\")'"
    ),
    "stays behind": "(setsid sleep $long &) ; setsid sh -c 'trap \"\" TERM HUP; sleep $long' & echo left",
    "forks without end": "f() { f | f & }; f; wait; sleep $long",
    "writes without end": "yes",
    "fills the memory": "python3 -c 'x = [bytearray(1 << 28) for _ in range(9)]'",
    "fills the folder": "cat /dev/zero > big; for i in $$(seq 9999); do : > f$$i || break; done",
    "hangs": "sleep $long",
    "takes the processor": "while :; do :; done",
    "makes devices": "mknod d b 8 0 || mkfifo d",
    "nul": "printf 'a\\0b'; exit 7",
}
IN_PYTHON = {
    "forks": "import os; os.fork()",
    "runs programs": "import subprocess; subprocess.run(['true'])",
    "starts threads": "import threading; threading.Thread(target=print).start()",
    "reads memory": "open('/proc/self/mem')",
    "finds the environment": "import gc; [x for x in gc.get_objects() if 'Talking' in repr(type(x))][0]",
    "finds secrets": "import os; os.environ['JUDGE_KEY']",
    "traces": "import ctypes; 1 / (1 + ctypes.CDLL(None).ptrace(16, 1, 0, 0))",
    "listens": "import socket; socket.create_server(('127.0.0.1', 0))",
    "shares memory": "import multiprocessing.shared_memory as m; m.SharedMemory(create=True, size=9)",
    "ends its pipes": "import os; os.closerange(0, 99)",
    "answers for itself": "import os; [os.write(fd, b'\\n' * 99) for fd in (3, 4, 5, 6, 7)]",
    "ignores an end": "import signal, time\nwhile True:\n  try: time.sleep(9)\n  except BaseException: pass",
    "takes memory": "x = bytearray(1 << 40)",
    "goes on behind": "import signal, time; signal.signal(14, lambda *_: time.sleep(99)); signal.alarm(1)",
    "recurses": "f = lambda: f()\nf()",
    "prints without end": "while True: print('y' * 999)",
}


def run(story: Awaitable[None]) -> None:
    async def body() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await story

    asyncio.run(body())


def make_pool(factory: str = FACTORY) -> ConversationPool:
    needs_bubblewrap()
    task = ScoringTask(
        *("tooled", {}, 0, 8, 8, ANSWER_S, 1 << 30, factory, (FOLDER,), (FOLDER,)),
        secrets={"JUDGE_KEY": "sk1"},
    )
    return ConversationPool(Talking("tooled"), task, processes=1, attempts=3, sandbox=True, patience_s=10.0)


class Trajectory:
    """Calls tools, one a turn."""

    def __init__(self, pool: ConversationPool, name: str) -> None:
        self.pool, self.name = pool, name
        self.replies: list[Reply] = []

    async def run(self, tool: str, text: str) -> str:
        arguments = {"command" if tool == "shell" else "code": text}
        self.replies.append(Reply("", tool_calls=(ToolCall(tool, arguments),)))
        turn = await self.pool.answer(self.name, KEY, 1, self.replies)
        assert isinstance(turn, tuple), turn
        return turn[0].content


def sleeping() -> list[psutil.Process]:
    """Return the processes that an attack left."""
    found = psutil.process_iter(["cmdline"])
    left = [one for one in found if str(LONG_S) in " ".join(one.info["cmdline"] or ())]
    return psutil.wait_procs(left, timeout=30.0)[1]  # what was killed takes a moment to end


@pytest.mark.parametrize("tool", ["shell", "python"])
def test_no_attack_gets_out_of_a_trajectory_and_its_tools_go_on(tool: str) -> None:
    attacks = IN_THE_SHELL if tool == "shell" else IN_PYTHON

    async def story() -> None:
        with outside() as (names, was_touched):
            async with make_pool() as pool:
                honest = Trajectory(pool, "honest")
                assert await honest.run("python", "x = 5") == "[no output]"
                assert await honest.run("shell", "echo 7 > kept") == "[no output]"
                for name, code in attacks.items():
                    attacker = Trajectory(pool, name)
                    said = await attacker.run(tool, Template(code).safe_substitute(names | {"long": LONG_S}))
                    assert "secret" not in said.replace(str(names["secret"]), "") and "sk1" not in said, (
                        name,
                        said,
                    )
                    assert len(said) <= OUTPUT_BYTES + 200, name
                    assert not was_touched(), name
                    assert sleeping() == [], name
                    assert await attacker.run("shell", "echo on") == "on", name
                    assert await attacker.run("python", "1 + 1") == "2", name
                    await pool.forget(name)
                assert await honest.run("python", "x + 1") == "6"
                assert await honest.run("shell", "cat kept; ls | wc -l") == "7\n1"
                done = [*honest.replies, Reply("7")]
                assert await pool.answer("honest", KEY, 1, done) == Ended(1.0)
                (inside,) = psutil.Process(pool.processes[0].pid).children()
                assert inside.children(recursive=True) == []

    run(story())


def test_limits_are_those_that_are_said() -> None:
    async def story() -> None:
        async with make_pool() as pool:
            one = Trajectory(pool, "one")
            started = await one.run("shell", "i=0; while sleep 60 & do i=$((i+1)); echo $i; done 2>/dev/null")
            assert int(started.split("\n")[-2]) < PROCESSES
            endless = await one.run("shell", "echo first; yes")
            assert endless.startswith("first\ny\ny") and f"more than {MOST_WRITTEN >> 20} MiB]" in endless
            assert "bytes left out]" in endless and endless.count("y") > OUTPUT_BYTES // 3
            assert "[stopped after" in await one.run("shell", "echo a; sleep 60")
            assert (await one.run("shell", "echo a; exit 3")) == "a\n[exit code 3]"
            assert "File too large" in await one.run("shell", "truncate -s 1T big; rm big")
            late = await one.run("python", "y = 1\nwhile True: pass")
            assert late.endswith("; its variables are lost]")
            assert "NameError" in await one.run("python", "y")
            assert (await one.run("python", "import os; os._exit(3)")).startswith("[Python ended")
            assert "not run: the code takes more" in await one.run("python", "#" * 70_000)
            assert "cannot be run" in await one.run("shell", "#" * 200_000)
            assert "cannot be run" in await one.run("shell", "a\0b")
            assert await one.run("python", "import numpy\nnumpy.arange(3).sum()") in ("3", "np.int64(3)")

    run(story())


def test_no_tool_sees_the_folder_of_another_trajectory_and_a_new_one_is_empty() -> None:
    async def story() -> None:
        async with make_pool() as pool:
            one, other = Trajectory(pool, "one"), Trajectory(pool, "other")
            await one.run("shell", "echo mine > file; mkdir -p a/b; chmod 777 .")
            assert await other.run("shell", "ls; cat /scratch/file 2>/dev/null") == "[exit code 1]"
            assert await one.run("python", "open('file').read()") == "'mine\\n'"
            await pool.forget("one")
            again = Trajectory(pool, "one")
            assert await again.run("shell", "ls -l") == "total 0"

    run(story())


def test_an_answer_of_many_calls_takes_no_longer_than_its_time() -> None:
    async def story() -> None:
        async with make_pool() as pool:
            calls = tuple(ToolCall("shell", {"command": "sleep 60"}) for _ in range(4))
            turn = await pool.answer("one", KEY, 1, [Reply("", tool_calls=calls)])
            assert isinstance(turn, tuple)
            assert ["stopped after" in message.content for message in turn] == [True] * 4
            assert turn[-1].content == "[stopped after 0.0 s]"

    run(story())


@pytest.mark.parametrize("tool", ["shell", "python"])
def test_a_host_that_is_killed_is_no_mistake_of_the_environment(tool: str) -> None:
    async def story() -> None:
        async with make_pool() as pool:
            one = Trajectory(pool, "one")
            await one.run(tool, "1" if tool == "python" else "true")
            (inside,) = psutil.Process(pool.processes[0].pid).children()
            (conversation,) = inside.children()
            (keeper,) = conversation.children()
            assert len(keeper.children()) == 2
            for host in keeper.children():
                host.kill()
            arguments = {"command": "true", "code": "1"}
            del arguments["code" if tool == "shell" else "command"]
            asked = [*one.replies, Reply("", tool_calls=(ToolCall(tool, arguments),))]
            found = await pool.answer("one", KEY, 1, asked)
            assert found == Failed(f"the process of the tool {tool} has ended", infrastructure=True)
            assert isinstance(await pool.answer("one", KEY, 1, asked), tuple)

    run(story())


def test_a_kernel_that_makes_no_user_namespace_is_named() -> None:
    async def story() -> None:
        async with make_pool("talking:without_user_namespaces") as pool:
            reason = "a trajectory's processes could not be started: the tool shell: [Errno 28] No space"
            found = await pool.answer("one", KEY, 1, [Reply("7")])
            assert isinstance(found, Failed) and found.infrastructure and found.reason.startswith(reason)

    run(story())
