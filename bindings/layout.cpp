#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "areas.h"
#include "gil_free.h"
#include "ids.h"
#include "kvprism/base/error.h"
#include "kvprism/layout/kernel_blocks.h"
#include "kvprism/layout/segment_map.h"
#include "text.h"
#include "whole.h"

namespace kvprism::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// A tensor and what keeps its memory mapped and in place: the Python object and its exported
// buffer, without which a bytearray could still be resized or a mapping closed.
struct BoundTensor {
  CacheTensor tensor;
  nb::object owner;
};

std::string shown(nb::handle object) {
  std::string text = nb::repr(object).c_str();
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

[[noreturn]] void refuse(const char* path, std::string value, std::string expected) {
  fail(ErrorCode::kInvalidArgument, "cache tensor",
       {path, std::move(value), std::move(expected), {}});
}

constexpr const char* kCudaArray = "__cuda_array_interface__";
constexpr const char* kContiguous = "a contiguous array: the whole allocation, as bytes";

// The protocol of arrays on an accelerator that have no DLPack: a dictionary with address, shape,
// strides in bytes and a type such as "<f2". It does not tell the device.
void read_cuda_array(nb::handle memory, std::optional<int> device, CacheTensor& tensor) {
  const nb::object found = memory.attr(kCudaArray);
  try {
    const auto facts = nb::cast<nb::dict>(found);
    const auto [address, readonly] = nb::cast<std::pair<std::uint64_t, bool>>(facts["data"]);
    const auto shape = nb::cast<std::vector<std::uint64_t>>(facts["shape"]);
    const auto type = nb::cast<std::string>(facts["typestr"]);
    if (readonly) refuse("memory", "read-only", "a writable array");
    const std::uint64_t item = std::stoull(type.substr(2));
    std::uint64_t bytes = item;
    for (const std::uint64_t size : shape) {
      if (__builtin_mul_overflow(bytes, size, &bytes))
        refuse("memory", "a shape of more than 2^64 bytes", "the shape of an array in memory");
    }
    if (facts.contains("strides") && !facts["strides"].is_none()) {
      const auto strides = nb::cast<std::vector<std::int64_t>>(facts["strides"]);
      std::uint64_t expected = item;
      for (std::size_t axis = shape.size(); axis-- > 0;) {
        if (shape[axis] != 1 && static_cast<std::uint64_t>(strides.at(axis)) != expected)
          refuse("memory", "strides with gaps", kContiguous);
        expected *= shape[axis];
      }
    }
    tensor.base = reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
    tensor.bytes = bytes;
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    refuse("memory", shown(found), "a dictionary as version 3 of __cuda_array_interface__ has it");
  }
  if (!device) {
    refuse("device", "None",
           "the accelerator's ordinal, which __cuda_array_interface__ does not tell");
  }
}

// Returns what holds the export.
nb::object read_array(nb::handle memory, std::optional<int> device, CacheTensor& tensor) {
  nb::ndarray<> array;
  if (!nb::try_cast(memory, array, false)) {
    if (nb::hasattr(memory, kCudaArray)) {
      read_cuda_array(memory, device, tensor);
      return nb::none();  // the array itself is kept, and cannot be resized
    }
    refuse("memory", shown(memory),
           "a writable array (buffer, DLPack or __cuda_array_interface__), or an address with "
           "bytes");
  }
  std::int64_t expected = 1;
  for (std::size_t axis = array.ndim(); axis-- > 0;) {
    if (array.shape(axis) != 1 && array.stride(axis) != expected) {
      refuse("memory", "strides with gaps", kContiguous);
    }
    expected *= static_cast<std::int64_t>(array.shape(axis));
  }
  tensor.base = static_cast<std::byte*>(array.data());
  tensor.bytes = array.nbytes();
  const bool host = array.device_type() == nb::device::cpu::value;
  tensor.device = host ? -1 : array.device_id();
  const bool certain = host || array.device_type() == nb::device::cuda::value;
  if (device && certain && *device != tensor.device)
    refuse("device", std::to_string(*device),
           std::to_string(tensor.device) + ", where the array says that it lies, or None");
  return nb::capsule(new nb::ndarray<>(std::move(array)),
                     [](void* p) noexcept { delete static_cast<nb::ndarray<>*>(p); });
}

void make_tensor(BoundTensor* self, nb::object memory, std::vector<std::string> layers,
                 const Whole<std::uint64_t>& block_stride, const Whole<std::uint64_t>& layer_stride,
                 const Whole<std::uint64_t>& offset,
                 const std::optional<Whole<std::uint64_t>>& length, std::optional<int> device,
                 const Whole<std::uint64_t>& head_stride,
                 const Whole<std::uint32_t>& kernel_block_size) {
  ProblemList problems;
  CacheTensor tensor;
  tensor.layers = std::move(layers);
  tensor.block_stride = block_stride("block_stride", problems);
  tensor.layer_stride = layer_stride("layer_stride", problems);
  tensor.offset = offset("offset", problems);
  tensor.head_stride = head_stride("head_stride", problems);
  tensor.kernel_block_size = kernel_block_size("kernel_block_size", problems);
  std::optional<std::uint64_t> bytes;
  if (length) bytes = (*length)("bytes", problems);
  problems.throw_if_any(ErrorCode::kInvalidArgument, "cache tensor");
  if (nb::isinstance<nb::int_>(memory)) {
    std::uint64_t address = 0;
    if (!nb::try_cast(memory, address)) refuse("memory", shown(memory), "an address");
    if (!bytes)
      refuse("bytes", "None", "the length of the allocation in bytes, since memory is an address");
    tensor.base = reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
    tensor.bytes = *bytes;
  } else {
    nb::object held = read_array(memory, device, tensor);
    memory = nb::make_tuple(memory, held);
    if (bytes) refuse("bytes", std::to_string(*bytes), "None: the array knows its length");
  }
  if (device) tensor.device = *device;
  new (self) BoundTensor{std::move(tensor), std::move(memory)};
}

nb::typed<nb::object, SegmentMap> make_map(std::shared_ptr<const Projection> projection,
                                           const nb::typed<nb::sequence, BoundTensor>& bound) {
  std::vector<CacheTensor> tensors;
  nb::list owners;
  for (const nb::handle each : bound) {
    const BoundTensor* tensor = nullptr;
    if (!nb::try_cast(each, tensor, false) || tensor == nullptr)
      throw nb::type_error("tensors must hold CacheTensor");
    tensors.push_back(tensor->tensor);
    owners.append(tensor->owner);
  }
  std::shared_ptr<const SegmentMap> map;
  {
    const GilFree released;
    map = SegmentMap::make(std::move(projection), std::move(tensors));
  }
  nb::object instance = nb::cast(map);
  nb::keep_alive_obj(instance, nb::tuple(owners));
  return nb::typed<nb::object, SegmentMap>(instance);
}

std::vector<std::pair<std::uintptr_t, std::size_t>> to_pairs(const std::vector<Segment>& segments) {
  std::vector<std::pair<std::uintptr_t, std::size_t>> pairs;
  for (const Segment& segment : segments) {
    pairs.emplace_back(reinterpret_cast<std::uintptr_t>(segment.base), segment.length);
  }
  return pairs;
}

}  // namespace

void bind_layout(nb::module_& module) {
  nb::class_<BoundTensor>(module, "CacheTensor",
                          "One backing allocation, or a view of it that some layers use. Byte 0 of "
                          "layer l, block b and head h is base + offset + l * layer_stride + "
                          "b * block_stride + h * head_stride.")
      .def("__init__", &make_tensor, "memory"_a, nb::kw_only(), "layers"_a, "block_stride"_a,
           "layer_stride"_a = 0, "offset"_a = 0, "bytes"_a = nb::none(), "device"_a = nb::none(),
           "head_stride"_a = 0, "kernel_block_size"_a = 0,
           nb::sig("def __init__(self, memory: typing.Any, *, layers: "
                   "collections.abc.Sequence[str], block_stride: int, "
                   "layer_stride: int = 0, offset: int = 0, bytes: int | None = None, device: int "
                   "| None = None, head_stride: int = 0, kernel_block_size: int = 0) -> None"),
           R"(Describes memory; nothing is read or written.

Args:
    memory: The whole allocation as a contiguous writable array (NumPy, PyTorch, anything with a buffer, DLPack or
        ``__cuda_array_interface__``), which is kept alive and cannot be resized or closed meanwhile; or its address,
        which the caller keeps mapped.
    layers: Names, in the order of their places.
    block_stride: Bytes from one block to the next, at least a page.
    layer_stride: Bytes from one layer to the next.
    offset: Bytes from the start of the allocation to the first layer.
    bytes: Length of the allocation, only with an address.
    device: Ordinal of the accelerator, -1 for host memory; None takes the array's own, which arrays with nothing but
        ``__cuda_array_interface__`` do not tell.
    head_stride: Bytes from one head to the next; 0 takes what the layout and the other strides imply.
    kernel_block_size: Stored positions in a block of the attention kernel, when smaller than the block.

Raises:
    ArgumentError: The memory is no such thing.)")
      .def_prop_ro(
          "address",
          [](const BoundTensor& t) { return reinterpret_cast<std::uintptr_t>(t.tensor.base); },
          "Address of the allocation.")
      .def_prop_ro(
          "bytes", [](const BoundTensor& t) { return t.tensor.bytes; }, "Length of the allocation.")
      .def_prop_ro(
          "device", [](const BoundTensor& t) { return t.tensor.device; }, "-1 for host memory.")
      .def_prop_ro(
          "layers", [](const BoundTensor& t) { return t.tensor.layers; }, "Names of the layers.")
      .def_prop_ro(
          "block_stride", [](const BoundTensor& t) { return t.tensor.block_stride; }, "In bytes.")
      .def_prop_ro(
          "layer_stride", [](const BoundTensor& t) { return t.tensor.layer_stride; }, "In bytes.")
      .def_prop_ro(
          "offset", [](const BoundTensor& t) { return t.tensor.offset; }, "In bytes.")
      .def_prop_ro(
          "head_stride", [](const BoundTensor& t) { return t.tensor.head_stride; },
          "In bytes; 0 where it is implied.")
      .def_prop_ro(
          "kernel_block_size", [](const BoundTensor& t) { return t.tensor.kernel_block_size; },
          "In stored positions; 0 for the block.");

  nb::class_<SegmentMap>(module, "SegmentMap",
                         "Where the bytes of a block lie, proven once: inside their allocations "
                         "and disjoint. Keeps arrays "
                         "alive that its tensors were made of.")
      .def(nb::new_(&make_map), "projection"_a, "tensors"_a,
           R"(Proves a geometry.

Args:
    projection: The groups.
    tensors: Every allocation of the pool, or views of it.

Raises:
    ConfigError: With every problem at once.)")
      .def_prop_ro(
          "projection", [](const SegmentMap& map) { return map.projection().shared_from_this(); },
          "The groups.")
      .def(
          "object_bytes",
          [](const SegmentMap& map, const PyStoreIndex& group) {
            return map.object_bytes(
                checked(group, map.projection().num_store_groups(), "StoreIndex"));
          },
          "group"_a, "Bytes of one block of a group on this rank.")
      .def(
          "object_bytes",
          [](const SegmentMap& map, const PyGroupId& group) {
            return map.object_bytes(checked(group, map.projection().num_groups(), "GroupId"));
          },
          "group"_a)
      .def(
          "segments",
          [](const SegmentMap& map, const PyGroupId& group, const Whole<std::int32_t>& given) {
            const std::int32_t block = given("block");
            const GroupId id = checked(group, map.projection().num_groups(), "GroupId");
            if (!map.is_block(BlockId{block})) {
              fail(ErrorCode::kInvalidArgument, "segment map",
                   {"block",
                    std::to_string(block),
                    "from 1 to " + std::to_string(map.projection().num_blocks() - 1),
                    {}});
            }
            std::vector<Segment> out;
            map.append_segments(id, BlockId{block}, out);
            return to_pairs(out);
          },
          "group"_a, "block"_a,
          R"(Segments of one block in the order of the layout's name.

Args:
    group: Any transferable group.
    block: Its id in the pool, not the null block.

Returns:
    Pairs of address and bytes.

Raises:
    ArgumentError: There is no such block.)")
      .def_prop_ro(
          "regions",
          [](const SegmentMap& map) {
            std::vector<std::tuple<std::uintptr_t, std::size_t, int>> rows;
            for (const Region& region : map.regions()) {
              rows.emplace_back(reinterpret_cast<std::uintptr_t>(region.base), region.length,
                                region.device);
            }
            return rows;
          },
          "Each distinct allocation once, as (address, bytes, device).")
      .def_prop_ro(
          "layout_fingerprint",
          [](const SegmentMap& map) { return to_hex(map.layout_fingerprint()); },
          "32 hex digits over the geometry.");

  module.def(
      "kernel_blocks",
      [](const Whole<std::uint32_t>& tokens_per_block, const Whole<std::uint32_t>& states_per_block,
         const Whole<std::uint32_t>& tokens_per_state, const Whole<std::uint64_t>& count) {
        const BlockRatio ratio =
            BlockRatio::make(tokens_per_block("tokens_per_block"),
                             {states_per_block("states_per_block"),
                              tokens_per_state("tokens_per_state"), count("count")});
        return std::pair(ratio.kernel_blocks_per_block(), ratio.num_blocks());
      },
      nb::kw_only(), "tokens_per_block"_a, "states_per_block"_a, "tokens_per_state"_a, "count"_a,
      R"(How many kernel blocks one block is, and how many blocks a pool of kernel blocks holds.

Args:
    tokens_per_block: Tokens of one block of the scheduler.
    states_per_block: Stored positions of one kernel block.
    tokens_per_state: Tokens that one of them stands for.
    count: Kernel blocks in the pool.

Raises:
    ConfigError: Either division leaves a rest.)");
}

}  // namespace kvprism::bindings
