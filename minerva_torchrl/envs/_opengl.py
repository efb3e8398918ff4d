"""OpenGL, which only pictures need, and what to say where there is none."""

from __future__ import annotations

import warnings

OPENGL_ADVICE = (
    "set the environment variable MUJOCO_GL to 'egl' (Debian packages libegl1 and libgl1-mesa-dri) "
    "or to 'osmesa' (libosmesa6) before Python starts"
)

try:
    import mujoco  # noqa: F401
except AttributeError as error:  # of a library that MUJOCO_GL asks for and that is not there
    raise ImportError(
        f"mujoco can't be imported with this MUJOCO_GL ({error}): unset it, or {OPENGL_ADVICE}."
    ) from error


def no_opengl(error: Exception) -> RuntimeError:
    """What to raise where rendering fails because of OpenGL."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return RuntimeError(f"rendering needs OpenGL: {OPENGL_ADVICE}. The error was: {reason}")


def check_screen(backend: str | None) -> None:
    """Raise if OpenGL comes from GLFW and there is no screen.

    MuJoCo would find out, too, but the second time it ends the process.
    """
    if backend == "glfw":
        import glfw  # the other backends work without it

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # GLFW warns about what is raised here
            if not glfw.init():
                raise RuntimeError("GLFW finds no screen.")
