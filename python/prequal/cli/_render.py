"""A picture of a labelled mesh or point cloud: a small software rasteriser in NumPy, two views and a legend.

Nothing here needs a display, a GPU or a plotting library; Pillow draws the text and encodes the PNG.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from ._mesh import GREY, Mesh, label_colours

Array = npt.NDArray[Any]

WIDTH, HEIGHT = 1600, 960
HEAD, FOOT = 84, 92  # the title above and the legend below the two views
SUPERSAMPLING = 2
FLOAT_AT = 0.48  # height of the thing's middle in its panel, from the top: room for the shadow below
VIEWS = (("front", 0.0, 6.0), ("three-quarter", 38.0, 18.0))  # name, degrees turned, degrees from above
PAPER_TOP, PAPER_BOTTOM = np.array([250, 251, 253]) / 255, np.array([222, 227, 234]) / 255
INK, FAINT = (38, 43, 51), (104, 112, 124)
# The axes that become right and up, and the one towards the viewer with its sign (which keeps it right-handed).
UP = {"x": ([1, 0, 2], -1.0), "y": ([0, 1, 2], 1.0), "z": ([0, 2, 1], -1.0)}


def write_picture(stream: BinaryIO, mesh: Mesh, labels: Array, up: str, title: str, subtitle: str) -> None:
    """PNG of the mesh from the front and from three-quarters, coloured by labels [N]."""
    points, normals, faces, shown = _posed(mesh, labels, up)
    width, height = WIDTH // 2, HEIGHT - HEAD - FOOT
    colours = (label_colours(shown) / 255).astype(np.float32)
    # One scale for both views, so that the thing does not seem to grow as it turns.
    turned = [points @ _rotation(turn, pitch).T for _, turn, pitch in VIEWS]
    reach = max(max(float(np.ptp(p[:, 0])) / (0.86 * width), float(np.ptp(p[:, 1])) / (0.84 * height)) for p in turned)
    scale = 1.0 / reach if reach > 0 else 1.0

    page = Image.new("RGB", (WIDTH, HEIGHT))
    page.paste(_image(_paper(WIDTH, HEIGHT, 0, HEIGHT)))
    for k, (name, turn, pitch) in enumerate(VIEWS):
        rotation = _rotation(turn, pitch)
        view = _view(points, normals, faces, shown, colours, rotation, scale, width, height)
        page.paste(_image(view), (k * width, HEAD))
        ImageDraw.Draw(page).text((k * width + width // 2, HEAD + 10), name, FAINT, _font(18), anchor="mt")
    _write_text(page, labels, title, subtitle)
    page.save(stream, format="PNG", optimize=False)


# Geometry ------------------------------------------------------------------------------------------------------------


def _posed(mesh: Mesh, labels: Array, up: str) -> tuple[Array, Array | None, Array, Array]:
    """Finite points centred with y up and z towards the viewer, their normals, faces re-indexed to them, labels."""
    keep = np.flatnonzero(mesh.finite)
    number = np.full(len(mesh.vertices), -1, np.int64)
    number[keep] = np.arange(len(keep))
    order, sign = UP[up]
    flip = np.array([1.0, 1.0, sign])
    points = mesh.unit_vertices[keep].astype(np.float64)[:, order] * flip
    points -= (points.min(axis=0) + points.max(axis=0)) / 2
    normals = None if mesh.normals is None else mesh.normals[keep][:, order] * flip
    return points, normals, number[mesh.drawable_faces], labels[keep]


def _rotation(turn: float, pitch: float) -> Array:
    """Rows are the viewer's right, up and towards axes."""
    a, b = math.radians(turn), math.radians(pitch)
    about_y = np.array([[math.cos(a), 0, math.sin(a)], [0, 1, 0], [-math.sin(a), 0, math.cos(a)]])
    about_x = np.array([[1, 0, 0], [0, math.cos(b), -math.sin(b)], [0, math.sin(b), math.cos(b)]])
    rotation: Array = about_x @ about_y
    return rotation


# Rasterising ---------------------------------------------------------------------------------------------------------


@dataclass
class _Buffer:
    """A z-buffer that is also an item buffer: the upper half of each 64-bit cell is depth, the lower half who won.

    One np.maximum.at settles any number of candidates for any pixels, in any order, always to the same result.
    """

    width: int
    height: int

    def __post_init__(self) -> None:
        self.cells = np.zeros(self.width * self.height, np.uint64)

    def offer(self, x: Array, y: Array, depth: Array, item: Array) -> None:
        """Candidates inside the picture; depth in 0..1, larger is nearer."""
        level = (np.clip(depth, 0, 1) * (2**31 - 2)).astype(np.uint64) + np.uint64(1)
        np.maximum.at(self.cells, y * self.width + x, (level << np.uint64(32)) | item.astype(np.uint64))

    @property
    def depth(self) -> Array:
        """[H, W], 0 where nothing is."""
        level = (self.cells >> np.uint64(32)).astype(np.float64)
        return (np.maximum(level - 1, 0) / (2**31 - 2)).reshape(self.height, self.width)

    @property
    def item(self) -> Array:
        """[H, W] int64, -1 where nothing is."""
        item = (self.cells & np.uint64(0xFFFFFFFF)).astype(np.int64)
        return np.where(self.cells == 0, -1, item).reshape(self.height, self.width)


def _draw_triangles(buffer: _Buffer, xy: Array, depth: Array, faces: Array) -> None:
    """Scan conversion of all triangles at once: triangles to rows, rows to pixels, by repetition.

    Visits covered pixels alone, so the long slivers of a machine part cost no more than a scan's many small ones.
    """
    corner = xy[faces]  # [F, 3, 2]
    low = np.ceil(corner.min(axis=1) - 0.5).astype(np.int64).clip(0)
    high = np.floor(corner.max(axis=1) - 0.5).astype(np.int64)
    high = np.minimum(high, [buffer.width - 1, buffer.height - 1])
    area = _twice_area(corner)
    drawn = np.flatnonzero((high >= low).all(axis=1) & (area != 0))
    extent = (high - low + 1)[drawn]
    cost = np.cumsum(np.minimum(np.abs(area[drawn]), extent.prod(axis=1)) + extent.sum(axis=1))
    cuts = np.flatnonzero(np.diff(cost // 1_000_000)) + 1  # bounds the memory of one step
    for some in np.split(drawn, cuts):
        face, row = _expand(some, low[some, 1], high[some, 1])
        ay, by, cy = corner[face, :, 1].T
        start = low[face, 0]
        weights = np.stack(_weights(corner[face], start + 0.5, row + 0.5))  # [3, R], at the row's first pixel
        slope = np.stack([by - cy, cy - ay, ay - by]) / area[face]  # their change a pixel
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = (-1e-9 - weights) / slope  # pixels from start to where a weight leaves or enters 0
        outside = ((slope == 0) & (weights < -1e-9)).any(axis=0)
        first = np.where(slope > 0, crossing, 0.0).max(axis=0)
        last = np.where(slope < 0, crossing, np.inf).min(axis=0)
        last = np.where(outside, -1, np.minimum(last, high[face, 0] - start))
        first = np.minimum(first, last + 2)  # keep an empty row's ends in integer range
        span, x = _expand(np.arange(len(face)), np.ceil(first).astype(np.int64), np.floor(last).astype(np.int64))
        at_start = np.einsum("kr,rk->r", weights, depth[faces[face]])
        change = np.einsum("kr,rk->r", slope, depth[faces[face]])
        buffer.offer(x + start[span], row[span], at_start[span] + x * change[span], face[span])


def _expand(items: Array, first: Array, last: Array) -> tuple[Array, Array]:
    """Each item once for every integer from its first to its last, and those integers."""
    count = np.maximum(last - first + 1, 0)
    end = np.cumsum(count)
    steps = np.arange(end[-1] if len(end) else 0) - np.repeat(end - count, count)
    return np.repeat(items, count), np.repeat(first, count) + steps


def _twice_area(corner: Array) -> Array:
    (ax, ay), (bx, by), (cx, cy) = ((corner[..., k, 0], corner[..., k, 1]) for k in range(3))
    area: Array = (bx - ax) * (cy - ay) - (by - ay) * (cx - ax)
    return area


def _weights(corner: Array, x: Array, y: Array) -> tuple[Array, Array, Array]:
    """Barycentric weights of the pixel centres (x, y) in triangles corner [..., 3, 2]."""
    (ax, ay), (bx, by), (cx, cy) = ((corner[..., k, 0], corner[..., k, 1]) for k in range(3))
    area = _twice_area(corner)
    u = ((bx - x) * (cy - y) - (by - y) * (cx - x)) / area
    v = ((cx - x) * (ay - y) - (cy - y) * (ax - x)) / area
    return u, v, 1 - u - v


def _draw_discs(buffer: _Buffer, xy: Array, depth: Array, radius: float, pixel_depth: float) -> None:
    """Each point as a small cap, so that between two points the nearer one owns the pixel."""
    n = math.ceil(radius)
    column, row = np.floor(xy).astype(np.int64).T
    items = np.arange(len(xy))
    for dy in range(-n, n + 1):
        for dx in range(-n, n + 1):
            x, y = column + dx, row + dy
            away = (x + 0.5 - xy[:, 0]) ** 2 + (y + 0.5 - xy[:, 1]) ** 2
            # At least the point's own pixel, however small the disc.
            hit = (away <= max(radius, 0.75) ** 2) & (x >= 0) & (y >= 0) & (x < buffer.width) & (y < buffer.height)
            cap = depth[hit] - 0.25 * pixel_depth * np.sqrt(away[hit])
            buffer.offer(x[hit], y[hit], cap, items[hit])


# Shading -------------------------------------------------------------------------------------------------------------


def _view(
    points: Array,
    normals: Array | None,
    faces: Array,
    labels: Array,
    colours: Array,
    rotation: Array,
    scale: float,
    width: int,
    height: int,
) -> Array:
    """[height, width, 3] float in 0..1."""
    w, h = width * SUPERSAMPLING, height * SUPERSAMPLING
    unit = scale * SUPERSAMPLING  # pixels a unit of length
    seen = points @ rotation.T
    middle = (seen.min(axis=0) + seen.max(axis=0)) / 2
    xy = (seen[:, :2] - middle[:2]) * unit * [1, -1] + [w / 2, h * FLOAT_AT]
    nearest, farthest = float(seen[:, 2].max()), float(seen[:, 2].min())
    # A margin keeps drawn depth off 0, and makes a flat thing divide by something.
    thickness = max((nearest - farthest) * 1.02, 1.0 / unit)
    depth = (seen[:, 2] - nearest) / thickness + 1
    pixel_depth = 1.0 / (unit * thickness)

    buffer = _Buffer(w, h)
    if normals is not None:
        _draw_triangles(buffer, xy, depth, faces)
    else:
        _draw_discs(buffer, xy, depth, _disc_radius(xy), pixel_depth)
    item, relief = buffer.item, buffer.depth / pixel_depth  # depth in pixels
    solid = item >= 0

    if normals is not None:
        normal, vertex = _mesh_pixels(item, solid, xy, seen, faces, normals @ rotation.T)
    else:
        normal, vertex = _cloud_normals(relief, solid), item[solid]

    canvas = _paper(w, h, HEAD * SUPERSAMPLING, HEIGHT * SUPERSAMPLING)
    canvas *= _ground_shadow(points, faces, rotation, middle, unit, w, h)[..., None]
    lit = _lit(colours[vertex], normal)
    lit *= _hollows(relief, solid, w)[:, None]
    owner = np.full(item.shape, -2, np.int32)
    owner[solid] = labels[vertex]
    canvas[solid] = lit * _lines(owner, relief, solid)[solid][:, None]
    small: Array = canvas.reshape(height, SUPERSAMPLING, width, SUPERSAMPLING, 3).mean(axis=(1, 3))
    return small


def _disc_radius(xy: Array) -> float:
    """Pixels: wide enough to close the surface between neighbours, from how many pixels the points fall on."""
    cell = 8.0
    occupied = len(np.unique((xy // cell).astype(np.int64), axis=0)) * cell**2
    return float(np.clip(1.6 * math.sqrt(2 * occupied / len(xy)), 1.0, 14.0))  # 2: a surface has a front and a back


def _mesh_pixels(
    item: Array, solid: Array, xy: Array, seen: Array, faces: Array, normals: Array
) -> tuple[Array, Array]:
    """For the covered pixels: the interpolated normal, and the corner that weighs most.

    A label is a category, so a pixel shows one vertex's colour and never a mixture of two.
    """
    a, b, c = (seen[faces[:, k]] for k in range(3))
    flat = np.cross(b - a, c - a)[:, None]
    flat /= np.maximum(np.linalg.norm(flat, axis=-1, keepdims=True), 1e-30)
    corner = normals[faces]  # [F, 3, 3]
    # Past about 45 degrees between a face and its vertex normal, the edge is a real one: shade it flat.
    crease = (corner * flat).sum(axis=-1, keepdims=True) < 0.7
    corner = np.where(crease, flat, corner).astype(np.float32)

    face = item[solid]
    row, column = np.nonzero(solid)
    weights = np.stack(_weights(xy[faces[face]], column + 0.5, row + 0.5), axis=-1).astype(np.float32)
    normal = np.einsum("pcx,pc->px", corner[face], weights)
    normal /= np.maximum(np.linalg.norm(normal, axis=1, keepdims=True), 1e-30)
    normal[normal[:, 2] < 0] *= -1  # a sheet has two sides, and files disagree about winding
    return normal, faces[face, weights.argmax(axis=1)]


def _cloud_normals(relief: Array, solid: Array) -> Array:
    """Normals of a point cloud as the slope of its smoothed depth picture."""
    smooth = _blur_within(relief, solid, 3)
    slopes = []
    for axis in (1, 0):
        # One-sided differences, the flatter of the two: no slope across the outline or a step in depth.
        pixels = np.moveaxis(solid, axis, 0)
        change = np.diff(np.moveaxis(smooth, axis, 0), axis=0)
        change[~(pixels[1:] & pixels[:-1])] = np.inf
        ahead = np.pad(change, ((0, 1), (0, 0)), constant_values=np.inf)
        behind = np.pad(change, ((1, 0), (0, 0)), constant_values=np.inf)
        flatter = np.where(np.abs(ahead) < np.abs(behind), ahead, behind)
        flatter[np.isinf(flatter)] = 0
        slopes.append(np.moveaxis(flatter, 0, axis)[solid])
    across, down = slopes
    normal = np.stack([-across, down, np.ones_like(across)], axis=-1, dtype=np.float32)
    normal /= np.linalg.norm(normal, axis=1, keepdims=True)
    return normal


def _lit(colour: Array, normal: Array) -> Array:
    """Key light from the upper left, a weak fill from the right, a sky over a warmer ground, a soft highlight."""

    def towards(x: float, y: float, z: float) -> Array:
        direction = np.array([x, y, z], np.float32)
        return normal @ (direction / np.linalg.norm(direction))

    key = np.clip(towards(-0.5, 0.65, 0.75) * 0.9 + 0.1, 0, None)
    fill = np.clip(towards(0.8, 0.1, 0.45), 0, None)
    sky = 0.5 + 0.5 * normal[:, 1]
    light = 0.30 + 0.62 * key + 0.14 * fill + 0.14 * sky
    gloss = np.clip(towards(-0.27, 0.35, 1.0), 0, None) ** 36
    linear = colour**2.2 * light[:, None] ** 1.5 + 0.07 * gloss[:, None]
    result: Array = np.clip(linear, 0, 1) ** (1 / 2.2)
    return result


def _hollows(relief: Array, solid: Array, width: int) -> Array:
    """Covered pixels' brightness: darker the farther they lie behind their surroundings, at two sizes."""
    # At half the resolution: the blur swallows the difference, and the time falls by four.
    half, within = relief[::2, ::2], solid[::2, ::2]
    shade = np.ones(half.shape, np.float32)
    for share, strength in ((0.006, 0.16), (0.025, 0.26)):
        radius = max(1, round(share * width / 2))
        behind = (_blur_within(half, within, radius) - half) / (2 * radius)
        shade *= 1 - strength * np.clip(behind, 0, 1)
    result: Array = np.repeat(np.repeat(shade, 2, axis=0), 2, axis=1)[solid]
    return result


def _lines(owner: Array, relief: Array, solid: Array) -> Array:
    """[H, W] brightness: a thin line round the outline, along steps in depth, and fainter between two labels."""
    shade = np.ones(owner.shape, np.float32)
    for axis, way in ((0, 1), (0, -1), (1, 1), (1, -1)):
        neighbour = np.roll(owner, way, axis=axis)
        shade = np.where(solid & (neighbour != owner), np.minimum(shade, 0.80), shade)
        step = np.roll(relief, way, axis=axis) - relief
        shade = np.where(solid & (step > 14), np.minimum(shade, 0.62), shade)
        shade = np.where(solid & (neighbour == -2), np.minimum(shade, 0.62), shade)
    return shade


def _ground_shadow(points: Array, faces: Array, rotation: Array, middle: Array, unit: float, w: int, h: int) -> Array:
    """[H, W] brightness of the paper: the thing's soft shadow on a floor under it."""
    floor = points[:, 1].min()
    lowness = 1 - (points[:, 1] - floor) / max(float(np.ptp(points[:, 1])), 1e-30)
    fallen = points.copy()
    fallen[:, 1] = floor
    seen = fallen @ rotation.T
    coarse = 8
    xy = ((seen[:, :2] - middle[:2]) * unit * [1, -1] + [w / 2, h * FLOAT_AT]) / coarse
    buffer = _Buffer(w // coarse, h // coarse)
    if len(faces):
        _draw_triangles(buffer, xy, lowness, faces)
    else:
        _draw_discs(buffer, xy, lowness, 1.0, 0.0)
    # What hangs over half way up throws too soft a shadow to see.
    dark = _blur(np.clip(2 * buffer.depth - 1, 0, 1), round(0.018 * w / coarse))
    # No seam where the shadow meets the panel's edge.
    for axis, size in enumerate(dark.shape):
        inwards = np.minimum(np.arange(size), np.arange(size)[::-1]) / (0.12 * size)
        dark *= np.expand_dims(np.clip(inwards, 0, 1), 1 - axis)
    shade = 1 - 0.34 * dark
    # Smoothly back to full size: blocks of 8 would show.
    return _blur(np.repeat(np.repeat(shade, coarse, axis=0), coarse, axis=1), coarse // 2)


def _blur(picture: Array, radius: int) -> Array:
    """Three box means in a row: close to a Gaussian, at a cost that does not depend on the radius."""
    if radius < 1:
        return picture
    for _ in range(3):
        for axis in (0, 1):
            pad = [(0, 0), (0, 0)]
            pad[axis] = (radius + 1, radius)
            total = np.cumsum(np.pad(picture, pad, mode="edge"), axis=axis)
            n = picture.shape[axis]
            ahead = np.take(total, np.arange(2 * radius + 1, 2 * radius + 1 + n), axis=axis)
            picture = (ahead - np.take(total, np.arange(n), axis=axis)) / (2 * radius + 1)
    return picture


def _blur_within(picture: Array, mask: Array, radius: int) -> Array:
    """Blur that averages over masked-in pixels alone, so that the background does not bleed in."""
    weight = _blur(mask.astype(np.float64), radius)
    return np.divide(
        _blur(np.where(mask, picture, 0.0), radius), weight, out=np.zeros(picture.shape), where=weight > 1e-6
    )


# The page ------------------------------------------------------------------------------------------------------------


def _paper(width: int, height: int, start: int, total: int) -> Array:
    """Rows start..start+height of a page total rows high: a light gradient."""
    t = ((np.arange(height) + start) / total)[:, None, None]
    return np.broadcast_to((1 - t) * PAPER_TOP + t * PAPER_BOTTOM, (height, width, 3)).astype(np.float32)


def _image(picture: Array) -> Image.Image:
    return Image.fromarray(np.rint(picture.clip(0, 1) * 255).astype(np.uint8), "RGB")


def _font(size: int) -> Any:
    try:
        return ImageFont.load_default(size)
    except (OSError, ImportError):  # a Pillow built without FreeType has its one small bitmap font
        return ImageFont.load_default()


def _write_text(page: Image.Image, labels: Array, title: str, subtitle: str) -> None:
    draw = ImageDraw.Draw(page)
    draw.text((40, 20), title, INK, _font(30))
    draw.text((40, 58), subtitle, FAINT, _font(19))

    values, counts = np.unique(labels[labels >= 0], return_counts=True)
    room = 10
    biggest = np.sort(np.argsort(-counts, kind="stable")[:room])  # the largest few, told in order of label
    entries = [(label_colours(values[k : k + 1])[0], f"{values[k]}", f"{counts[k]:,}") for k in biggest]
    if (labels < 0).any():
        entries.append((np.array(GREY), "none", f"{int((labels < 0).sum()):,}"))
    x, y = 40, HEIGHT - FOOT + 18
    draw.text((x, y), "label", INK, _font(19))
    draw.text((x, y + 27), "vertices", FAINT, _font(17))
    x += 96
    for colour, name, count in entries:
        draw.rounded_rectangle((x, y + 2, x + 26, y + 46), 5, tuple(int(c) for c in colour), (90, 96, 106))
        draw.text((x + 36, y), name, INK, _font(19))
        draw.text((x + 36, y + 27), count, FAINT, _font(17))
        x += 124
    if len(values) > room:
        draw.text((x, y), f"and {len(values) - room:,}", INK, _font(19))
        draw.text((x, y + 27), "smaller ones", FAINT, _font(17))
