"""Several scenes of a test in one job of processes, each with its own keys and barriers."""

from typing import Any

from jax._src import distributed


class OfScene:
    """JAX's coordination client; names of keys and barriers begin with that of the scene."""

    def __init__(self, client: Any, scene: str):
        self._client, self._scene = client, scene.replace(" ", "_")

    def __getattr__(self, method: str):
        call = getattr(self._client, method)
        return lambda name, *arguments: call(f"{self._scene}/{name}", *arguments)


def play(scenes, scene_of) -> None:
    """Calls `scene_of` with the name of each scene; prints the name first. JAX has started."""
    state: Any = distributed.global_state
    client = state.client
    try:
        for scene in scenes:
            print(f"scene {scene}:", flush=True)
            state.client = OfScene(client, scene)
            scene_of(scene)
    finally:
        state.client = client


def of_scene(scene: str, out: str) -> str:
    """Returns what a process printed in a scene."""
    return out.split(f"scene {scene}:\n")[1].split("scene ")[0]
