"""Attacks of code in a child process, as source of the module that `python -m benchmarks hostile` runs in children."""

from pathlib import Path

COMMON = """
import binascii, ctypes, errno, json, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)", "hostile-child-mark"]

def fork(*steps):
    if os.fork() == 0:
        for step in steps: step()
        os._exit(0)

def rest(): time.sleep(600)
def deaf():
    for number in (1, 2, 3, 15): signal.signal(number, signal.SIG_IGN)
def popen(**options): subprocess.Popen(SLEEP, stdin=-3, stdout=-3, stderr=-3, **options)
def others(payload): return [*payload["pids"], *[pid for pid in [os.getppid()] if pid > 1]]  # 1: the first process of its own namespace

def attempt(action, name):
    try: return [name] if action() in (None, True) else []
    except OSError: return []

def signals(payload, *numbers):
    numbers = numbers if payload["safe"] else (0,)
    return [hit for pid in others(payload) for number in numbers for hit in attempt(lambda: os.kill(pid, number), f"signal {number}")]

def secret_in(path):
    with open(path, "rb", buffering=0) as file:
        return b"HUNTER2" in file.read(1 << 20)

def reads(payload, name): return [hit for pid in others(payload) for hit in attempt(lambda: secret_in(f"/proc/{pid}/{name}"), name)]
def readable(path):  # `maps` of a process that has ended opens for any user, and is empty
    file = os.open(path, 0)
    try: return os.pread(file, 1, 0) != b""
    except OSError as error: return error.errno == errno.EIO  # no page at this address, of a process that may be read
    finally: os.close(file)
def opens(payload, name): return [hit for pid in others(payload) for hit in attempt(lambda: readable(f"/proc/{pid}/{name}"), name)]
def links(payload, name): return [hit for pid in others(payload) for hit in attempt(lambda: bool(os.readlink(f"/proc/{pid}/{name}")), name)]
def ptrace(payload, how):
    pids = [] if how == 16 and not payload["safe"] else others(payload)
    return [hit for pid in pids for hit in attempt(lambda: libc.ptrace(how, pid, 0, 0) == 0, "ptrace")]
def vm_read(payload):
    buffer = ctypes.create_string_buffer(64)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 64)
    remote = (ctypes.c_size_t * 2)(0x400000, 64)
    return [hit for pid in others(payload) for hit in attempt(lambda: libc.process_vm_readv(pid, vector, 1, remote, 1, 0) > 0, "memory")]
def pidfd(payload):
    return [hit for pid in others(payload) for hit in attempt(lambda: libc.syscall(438, os.pidfd_open(pid), 1, 0) >= 0, "descriptor")]
def limits(payload):
    set_again = lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE, resource.prlimit(pid, resource.RLIMIT_NOFILE)) != ()
    return [hit for pid in others(payload) for hit in attempt(lambda: set_again(pid), "limits")]
def priority(payload):
    set_again = lambda pid: os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid))
    return [hit for pid in others(payload) for hit in attempt(lambda: set_again(pid), "priority")]
def every_environ(payload):
    pids = [pid for pid in os.listdir("/proc") if pid.isdigit()]
    return [hit for pid in pids for hit in attempt(lambda: secret_in(f"/proc/{pid}/environ"), "environ")]
def link_of(number):
    try:
        target = os.readlink(f"/proc/self/fd/{number}")
        if not target.startswith("socket:"): return target
        with socket.socket(fileno=os.dup(int(number))) as own:  # the child's own event loop has a pair of them
            pid = int.from_bytes(own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
            return "/dev/null" if pid == os.getpid() else target
    except OSError: return "/dev/null"
def inherited():
    targets = [link_of(number) for number in os.listdir("/proc/self/fd") if int(number) > 2]
    return [target for target in targets if not target.startswith(("pipe:", "/proc/", "/dev/null", "anon_inode:"))]
def write_all(data):
    for descriptor in range(1, 40):
        try: os.write(descriptor, data)
        except OSError: pass
def grow():
    kept = []
    while True: kept.append(bytearray(16 << 20))
def deep(): return deep() + 1
def sparse(payload):
    with open(payload["folder"] + "/sparse", "wb") as file: file.truncate(1 << 40)
def open_files():
    kept = []
    while True: kept.append(open("/dev/null"))
def chatter(text):
    while True: os.write(1, text); os.write(2, text)
def big_file(payload):
    with open(payload["folder"] + "/big", "wb") as file:
        while True: file.write(bytes(1 << 20))
def bomb():
    end = time.time() + 10
    while time.time() < end:
        try: os.fork()
        except OSError: pass
    os._exit(0)
def threads():
    for _ in range(500): threading.Thread(target=rest, daemon=True).start()
"""
IN_A_RUN = """
FOLDER = os.path.dirname(__file__)
SAFE = os.path.exists(FOLDER + "/safe")

def stat(pid):
    try:
        with open(f"/proc/{pid}/stat") as file: return file.read().rpartition(")")[2].split()
    except OSError: return []

def of_the_run():
    with open(FOLDER + "/pids") as file: given = file.read().split()
    if not SAFE or os.getpid() < 10: return list(map(int, given))
    parents = {int(pid): int(stat(pid)[1]) for pid in os.listdir("/proc") if pid.isdigit() and stat(pid)}
    chosen = {pid for pid in parents if RUN in command_of(pid)} | set(map(int, given))
    for _ in range(6): chosen |= {pid for pid, parent in parents.items() if parent in chosen}
    return sorted(chosen - {os.getpid(), os.getppid()})

def command_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file: return file.read()
    except OSError: return b""

RUN = b"hostile-run"

def attack(name, text):
    if not os.path.exists(FOLDER + "/home/runs/hostile-run/logs"): return False
    if binascii.crc32(text.encode(errors="replace")) % 3 and name in lines_of("tried"): return False
    append("tried", name)
    for hit in set(run({"do": name, "pids": of_the_run(), "folder": FOLDER, "safe": SAFE}) or []): append("reached", f"{name}: {hit}")
    return True

def lines_of(file):
    try:
        with open(f"{FOLDER}/{file}") as lines: return lines.read().splitlines()
    except OSError: return []

def append(file, line):
    with open(f"{FOLDER}/{file}", "a") as lines: lines.write(line + "\\n")

def judge(completions, attack_name, answer, **columns):
    rewards = []
    for completion, name, right in zip(completions, attack_name, answer):
        hostile = attack(name, completion)
        rewards.append(float(len(completion) % 4) + hostile)
    append("judged", str(len(rewards)))
    return rewards

def agent():
    import urllib.request
    row = json.loads(sys.stdin.readline())
    def post(path, body):
        headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
        return json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request))
    said = post("/chat/completions", {"model": "m", "messages": [{"role": "user", "content": row["prompt"]}]})
    text = said["choices"][0]["message"]["content"] or ""
    post("/reward", {"reward": float(len(text) % 4)})
    attack(row["attack_name"], text + str(row.get("seed")))
"""
FUNCTIONS = {
    "fork bomb": "bomb()",
    "fork bomb, new sessions": "os.setsid() if os.getpid() != os.getsid(0) else None; fork(os.setsid, bomb); rest()",
    "60 sleepers": "[popen() for _ in range(70)]; rest()", "500 threads": "threads()", "setsid": "popen(start_new_session=True)",
    "double fork": "fork(os.setsid, lambda: fork(lambda: os.execv(SLEEP[0], SLEEP)))",
    "double fork, deaf": "fork(os.setsid, deaf, lambda: fork(os.setsid, rest))",
    "daemon, environment cleared": "popen(start_new_session=True, env={})",
    "setsid, double fork, closed": "fork(os.setsid, lambda: fork(lambda: os.closerange(0, 256), rest))",
    "own process group": "popen(process_group=0)",
    "chain of sessions": "fork(os.setsid, lambda: fork(os.setsid, lambda: fork(os.setsid, rest), rest), rest)",
    "own subreaper": "libc.prctl(36, 1, 0, 0, 0); fork(os.setsid, lambda: fork(rest))",
    "stopped daemon": "fork(os.setsid, lambda: os.kill(os.getpid(), 19))",
    "daemon, then exit": "popen(start_new_session=True); os._exit(0)",
    "daemon, then SIGKILL": "popen(start_new_session=True); os.kill(os.getpid(), 9)", "ignores SIGTERM, hangs": "deaf(); rest()",
    "blocks all signals, hangs": "signal.pthread_sigmask(0, signal.valid_signals()); rest()", "stops itself": "os.kill(os.getpid(), 19)",
    "no parent death signal": "libc.prctl(1, 0, 0, 0, 0); popen(start_new_session=True)", "memory": "grow()",
    "memory in a daemon": "fork(os.setsid, grow); rest()",
    "memory of many": "[fork(lambda: (bytearray(20 << 20), rest())) for _ in range(20)]; rest()", "disk": "big_file(payload)",
    "sparse file": "sparse(payload)", "open files": "open_files()",
    "core dump": "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), 11)",
    "raises its limits": "return attempt(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 50, 1 << 50)), 'limit')",
    "deep recursion": "sys.setrecursionlimit(1 << 30); deep()", "segmentation fault": "ctypes.string_at(0)", "os._exit(0)": "os._exit(0)",
    "nice": "os.nice(19); return attempt(lambda: os.nice(-39) < 0, 'nice')", "endless output": "chatter(b'x' * 65536)",
    "control characters": "os.write(2, b'\\x1b[2J\\x1b]0;title\\x07\\x9b31m' * 99); raise ValueError('\\x1b[2J\\u202e' * 9)",
    "inherited descriptors": "return inherited()", "environ of all": "return every_environ(payload)",
    "limits of others": "return limits(payload)", "priority of others": "return priority(payload)",
    "environ of others": "return reads(payload, 'environ')", "memory of others": "return opens(payload, 'mem') + opens(payload, 'maps')",
    "descriptors of others": "return links(payload, 'fd/0') + links(payload, 'fd/1')",
    "folder and program of others": "return links(payload, 'cwd') + links(payload, 'exe') + links(payload, 'root')",
    "process_vm_readv": "return vm_read(payload)", "pidfd_getfd": "return pidfd(payload)",
    "ptrace": "return ptrace(payload, 16) + ptrace(payload, 0x4206)",
    "own environment": "return [name for name, value in os.environ.items() if 'HUNTER2' in value]",
    "kill -9 others": "return signals(payload, 9)", "kill -9 -1": "os.kill(-1, 9) if payload['safe'] else None",
    "SIGSTOP to others": "return signals(payload, 19)", "SIGTERM, SIGINT to others": "return signals(payload, 15, 2)",
    "closes all descriptors": "os.closerange(0, 100); rest()", "garbage on all descriptors": "write_all(b'garbage\\n'); rest()",
    "forged answers": 'write_all(b\'{"call": 7, "result": 1}\\n{"broken": "x"}\\n\'); rest()',
    "endless line": "data = b'x' * 65536\n        while True: write_all(data)", "deep JSON": "write_all(b'[' * 100000 + b'\\n'); rest()",
    "symbolic links": "os.symlink('/proc/self/fd/0', payload['folder'] + '/link'); os.symlink('/', payload['folder'] + '/root')",
    "listening socket": "server = socket.create_server(('127.0.0.1', 0)); fork(os.setsid, lambda: server.accept()); return []",
}  # fmt: skip


NOT_COVERED = {"landlock": {"limits of others", "priority of others"}, "bwrap": set[str](), "none": set(FUNCTIONS)}
"""What docs/explanation/security.md lists under "What is not covered": printed, and no failure."""


def write_module(folder: Path) -> None:
    """The handler of all functions, as the module that the children load."""
    cases = "".join(f"\n    if payload['do'] == {name!r}:\n        {code}" for name, code in FUNCTIONS.items())
    serve = "\n\ndef serve(init):\n    return lambda payload: run(payload) or []\n" + IN_A_RUN
    (folder / "hostile_functions.py").write_text(
        f"{COMMON}\ndef run(payload):\n    if payload['do'] == 'pid': return os.getpid(){cases}\n{serve}"
    )
