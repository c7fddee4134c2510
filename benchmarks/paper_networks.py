"""The networks of Re-forwarding's Table 1 as plain graphs: sizes and edges, no JAX.

Feng & Huang (2018) build, for each network, a graph whose vertices are float32 tensors for one
image of 224 x 224. The vertices here are those that reproduce the table's theoretical column:

- the image is a vertex: it is the source, and always kept;
- a convolution or dense layer and the activation after it, which works in place, are one vertex;
- with batch normalisation, the convolution is one vertex, and the normalisation with its
  activation the next; an addition and its activation are one; the last normalisation of a block
  and that of a downsampling shortcut are vertices of their own;
- a pooling is one vertex. Dropout works in place and is not one.

Channels and strides are torchvision's, which the paper used: a bottleneck block of ResNet has its
stride in the 3 x 3 convolution.
"""

from __future__ import annotations

from collections.abc import Callable

from remat_opt.graph import Graph

_FLOAT32_BYTES = 4
_IMAGE_SIDE = 224


class _Builder:
    """Collects vertices and edges in order."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._bytes: list[int] = []
        self._edges: list[tuple[int, int]] = []

    def add(self, name: str, channels: int, side: int, *reads: int) -> int:
        """A tensor of channels x side x side, computed from earlier ones."""
        vertex = len(self._names)
        self._names.append(f"{vertex}_{name}")
        self._bytes.append(_FLOAT32_BYTES * channels * side * side)
        self._edges += [(read, vertex) for read in reads]
        return vertex

    def graph(self) -> Graph:
        return Graph.from_edges(self._bytes, self._edges, names=self._names)


def alexnet() -> Graph:
    """AlexNet as in torchvision ("One weird trick", 2014)."""
    build = _Builder()
    last = build.add("image", 3, _IMAGE_SIDE)
    for name, channels, side in (
        ("conv", 64, 55),
        ("pool", 64, 27),
        ("conv", 192, 27),
        ("pool", 192, 13),
        ("conv", 384, 13),
        ("conv", 256, 13),
        ("conv", 256, 13),
        ("pool", 256, 6),
        ("dense", 4096, 1),
        ("dense", 4096, 1),
        ("dense", 1000, 1),
    ):
        last = build.add(name, channels, side, last)
    return build.graph()


#: Convolutions in each of the five stages, by number of layers.
_VGG = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def vgg(layers: int) -> Graph:
    """VGG without batch normalisation (Simonyan & Zisserman, 2014)."""
    build = _Builder()
    side = _IMAGE_SIDE
    last = build.add("image", 3, side)
    for channels, convolutions in zip((64, 128, 256, 512, 512), _VGG[layers], strict=True):
        for _ in range(convolutions):
            last = build.add("conv", channels, side, last)
        side //= 2
        last = build.add("pool", channels, side, last)
    for channels in (4096, 4096, 1000):
        last = build.add("dense", channels, 1, last)
    return build.graph()


#: Blocks in each of the four stages, by number of layers.
_RESNET = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}


def resnet(layers: int) -> Graph:
    """ResNet (He et al., 2015); bottleneck blocks from 50 layers on."""
    build = _Builder()
    side = _IMAGE_SIDE // 2
    last = build.add("image", 3, _IMAGE_SIDE)
    last = build.add("conv", 64, side, last)
    last = build.add("norm", 64, side, last)
    side //= 2
    last = build.add("pool", 64, side, last)
    channels = 64
    for stage, blocks in enumerate(_RESNET[layers]):
        width = 64 * 2**stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            block_of = _bottleneck if layers >= 50 else _basic
            last, channels = block_of(build, last, channels, width, side, stride)
            side //= stride
    last = build.add("pool", channels, 1, last)
    build.add("dense", 1000, 1, last)
    return build.graph()


def _basic(
    build: _Builder, start: int, channels: int, width: int, side: int, stride: int
) -> tuple[int, int]:
    after = side // stride
    last = start
    for name in ("conv", "norm", "conv", "norm"):
        last = build.add(name, width, after, last)
    shortcut = _shortcut(build, start, channels, width, after, stride)
    return build.add("add", width, after, last, shortcut), width


def _bottleneck(
    build: _Builder, start: int, channels: int, width: int, side: int, stride: int
) -> tuple[int, int]:
    after, wide = side // stride, 4 * width
    last = start
    for features, at in ((width, side), (width, after), (wide, after)):
        last = build.add("conv", features, at, last)
        last = build.add("norm", features, at, last)
    shortcut = _shortcut(build, start, channels, wide, after, stride)
    return build.add("add", wide, after, last, shortcut), wide


def _shortcut(
    build: _Builder, start: int, channels: int, wanted: int, side: int, stride: int
) -> int:
    if stride == 1 and channels == wanted:
        return start
    return build.add("norm", wanted, side, build.add("conv", wanted, side, start))


#: Name, graph, and the table's ratio of optimal to regular memory, "ours (Theoretical)".
TABLE_1: tuple[tuple[str, Callable[[], Graph], float], ...] = (
    ("alexnet", alexnet, 0.58),
    ("vgg11", lambda: vgg(11), 0.50),
    ("vgg13", lambda: vgg(13), 0.53),
    ("vgg16", lambda: vgg(16), 0.49),
    ("vgg19", lambda: vgg(19), 0.47),
    ("resnet18", lambda: resnet(18), 0.37),
    ("resnet34", lambda: resnet(34), 0.27),
    ("resnet50", lambda: resnet(50), 0.25),
    ("resnet101", lambda: resnet(101), 0.19),
    ("resnet152", lambda: resnet(152), 0.16),
)
