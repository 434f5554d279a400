"""The child's side: the student's code and the lab's driver, in a process with limits. Run as a script.

    argv[1]: settings (JSON)        read one request, answer it, until the other end closes
        {"load": [[label, source], ...]}        run the definitions
        {"new": [arguments]}                    a fresh driver over them
        {"op": [method, arguments...]}          one operation on it
    answers: {"value": plain} | {"raised": [class names], "message": str, "where": str}

Nothing here is trusted: it can at worst give a wrong answer, which is judged on the other side. The fence (limits,
audit hook, bars on our own implementation) is there so that an accident does no harm and a short cut earns nothing.
"""

import importlib
import json
import linecache
import os
import sys
import types

settings = json.loads(sys.argv[1])
FD = settings["fd"]


def _limit() -> None:
    try:
        import resource
    except ImportError:  # Windows: the wall clock alone
        return
    mib = 1 << 20
    for name, value in (
        ("RLIMIT_CORE", 0),
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_DATA", settings["memory_mib"] * mib),
        ("RLIMIT_AS", (settings["memory_mib"] + 1024) * mib),
        ("RLIMIT_CPU", settings["cpu_seconds"]),
    ):
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (ValueError, OSError, AttributeError):
            pass  # a limit that the system does not know, or has set lower


# ---- plain values


class NotPlain(Exception):
    """A value that is no plain one."""


def encode(value, depth=0):
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if depth > 12:
        raise NotPlain("a value nested more than 12 deep")
    if isinstance(value, list | tuple):  # named tuples too
        return [encode(item, depth + 1) for item in value]
    if kind in (set, frozenset):
        return {"set": sorted((encode(item, depth + 1) for item in value), key=repr)}
    if isinstance(value, dict):  # and those with a default
        return {"dict": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind.__module__ in ("numpy", "torch") and hasattr(value, "tolist"):
        if settings["gives_part"]:  # the engine refuses them too: see the complaints in kvlab/parts/kinds.py
            raise NotPlain(f"an object of {kind.__module__}'s class {kind.__name__} (its .tolist() is plain)")
        return encode(value.tolist(), depth + 1)
    raise NotPlain(f"an object of class {kind.__name__}")


def decode(value):
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        ((kind, items),) = value.items()
        if kind == "set":
            return set(map(decode, items))
        if kind == "bytes":
            return bytes.fromhex(items)
        return {decode(k): decode(v) for k, v in items}
    return value


# ---- our own implementation earns nothing


class OursIsBarred(Exception):
    """The student's code reached for kvlab's own implementation of what is graded."""


class Barred:
    """Stands where our implementation stood."""

    def __init__(self, name):
        object.__setattr__(self, "_name", name)

    def _refuse(self, *_, **__):
        name = object.__getattribute__(self, "_name")
        raise OursIsBarred(f"{name} is kvlab's own: in this exercise you build it yourself")

    __call__ = __getattr__ = __setattr__ = __getitem__ = __mro_entries__ = __iter__ = _refuse


def find(target):
    """(owner, name, value) of "module:name" or "module:Class.method"."""
    module, path = target.split(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    return owner, name, getattr(owner, name)


def bar(targets, spared) -> None:
    """Put a stand-in wherever kvlab names one of `targets`, or a class that inherits from one."""
    ours = []
    for target in targets:
        owner, name, value = find(target)
        ours.append(value)
        if isinstance(owner, type):
            setattr(owner, name, Barred(name))

    def is_barred(value):
        lineage = value.__mro__ if isinstance(value, type) else (value,)
        return any(one is other for one in lineage for other in ours)

    for loaded in list(sys.modules.values()):
        if loaded is spared or not getattr(loaded, "__name__", "").startswith("kvlab"):
            continue
        for key, value in list(vars(loaded).items()):
            if callable(value) and is_barred(value):
                setattr(loaded, key, Barred(key))
    for key, value in OURS.items():
        if is_barred(value):
            OURS[key] = Barred(key)


FORBIDDEN = (
    "os.system", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.kill", "os.killpg",
    "os.remove", "os.rename", "os.truncate", "os.chmod", "os.mkdir", "os.rmdir", "os.symlink", "os.link",
    "subprocess.Popen", "pty.spawn", "socket.connect", "socket.bind", "ctypes.dlopen", "signal.pthread_kill",
)  # fmt: skip


def fence(closed_folders) -> None:
    """From here on: no processes, no network, no writing, no reading of the project's own files."""
    closed = tuple(os.path.join(folder, "") for folder in closed_folders)
    fspath, realpath, startswith = os.fspath, os.path.realpath, str.startswith
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def hook(event, arguments):
        if event in FORBIDDEN:
            packages = ": an exercise is plain Python, or numpy" if event == "ctypes.dlopen" else ""
            raise PermissionError(f"the grader does not allow {event}{packages}")
        if event == "open":
            path, mode, flags = arguments
            if isinstance(path, int):
                return
            if (isinstance(mode, str) and mode.strip("rbtU")) or (isinstance(flags, int) and flags & writing):
                raise PermissionError("the grader does not allow writing files")
            path = realpath(fspath(path))
            if startswith(path if isinstance(path, str) else path.decode(errors="replace"), closed):
                raise PermissionError("the grader does not allow reading kvlab's own files")

    sys.addaudithook(hook)


# ---- serving


def answer(perform, request):
    try:
        return {"value": encode(perform(request))}
    except NotPlain as error:
        return {"raised": ["NotPlain"], "message": str(error), "where": ""}
    except BaseException as error:  # SystemExit too
        names = [c.__name__ for c in type(error).__mro__]
        try:
            message = str(error)[:1000]
        except BaseException:
            message = ""
        return {"raised": names, "message": message, "where": where(error)}


def where(error) -> str:
    """The innermost line of the student's own code that an exception went through."""
    place, trace = "", error.__traceback__
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}"
    while trace:
        if trace.tb_frame.f_code.co_filename.startswith("<your notebook"):
            place = f"line {trace.tb_lineno} of {trace.tb_frame.f_code.co_name}"
        trace = trace.tb_next
    return place


class Calls:
    """The driver of an exercise that has none: an operation is a call of what the student defined."""

    def __init__(self, student, *_):
        self.student = student

    def __getattr__(self, name):
        return getattr(self.student, name)


def serve(driver_class, names) -> None:
    read, write, pack = os.read, os.write, int.to_bytes
    student, driver = None, None

    def exactly(n):
        data = b""
        while len(data) < n:
            if not (part := read(FD, n - len(data))):
                os._exit(0)
            data += part
        return data

    def load(source):
        module = types.ModuleType("notebook")
        sys.modules["notebook"] = module
        space = vars(module)
        space["lab"] = types.SimpleNamespace(best=best)
        space["check"] = space["hint"] = lambda *_: None
        for label, text in source:
            linecache.cache[label] = len(text), None, text.splitlines(True), label  # so that a driver can look it up
            exec(compile(text, label, "exec"), space)
        return types.SimpleNamespace(**{name: space[name] for name in names})

    def perform(request):
        nonlocal student, driver
        if "load" in request:
            student = load(request["load"])
        elif "new" in request:
            driver = driver_class(student, *decode(request["new"]))
        else:
            method, *arguments = request["op"]
            return getattr(driver, method)(*decode(arguments))

    while True:
        request = json.loads(exactly(int.from_bytes(exactly(4), "big")))
        reply = json.dumps(answer(perform, request)).encode()
        reply = pack(len(reply), 4, "big") + reply
        while reply:
            reply = reply[write(FD, reply) :]


OURS = {}


def best(name):
    """lab.best, where one exercise is graded by itself: ours, of what an earlier exercise defines."""
    if name not in OURS:
        raise NameError(
            f"lab.best({name!r}) is not to be had while this exercise is graded; does your code use a variable "
            f"of another cell, where it should use its own arguments?"
        )
    return OURS[name]


def main() -> None:
    _limit()
    sys.path[:0] = settings["sys_path"]
    for module in settings["preload"]:
        importlib.import_module(module)
    for module in settings["optional"]:
        try:
            importlib.import_module(module)
        except ImportError:
            pass  # the student's own import will say so
    spared = types.ModuleType("driver")
    if settings["driver_path"]:
        with open(settings["driver_path"], encoding="utf-8") as file:
            exec(compile(file.read(), "driver.py", "exec"), vars(spared))
    for name, target in settings["fallback"].items():  # what other exercises of this lab would define
        OURS[name] = find(target)[2]
    bar(settings["barred"], spared)
    fence(settings["closed_folders"])
    name = settings["driver"]
    serve(vars(spared)[name] if name else Calls, settings["defines"])


main()
