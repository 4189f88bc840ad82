"""Tasks that are ended by who began them."""

import asyncio


async def end_tasks(*tasks: "asyncio.Task[object]") -> None:
    """Cancel tasks and wait until each has ended.

    The caller's own cancellation, where it comes meanwhile, stays: to await a cancelled task and pass over
    its `CancelledError` would pass over that of the caller too, and who was told to leave would go on.

    Raises:
        Exception: what one of the tasks ended with.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
