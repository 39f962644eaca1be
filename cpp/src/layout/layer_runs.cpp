#include "layout/layer_runs.h"

#include "spec/checked_math.h"

namespace kvprism::detail {
namespace {

constexpr const char* kOtherLayout = "the strides show another layout than kv_layout names";

class StrideCheck {
 public:
  StrideCheck(const LayerShape& shape, std::uint64_t layers, std::uint64_t span,
              const std::string& path, ProblemList& problems)
      : shape_(shape),
        tensor_(*shape.tensor),
        layers_(layers),
        layer_span_(saturating_mul(span, tensor_.layer_stride)),
        path_(path),
        problems_(problems) {}

  void check() {
    if (!fits()) return;
    kernel();
    heads();
    if (shape_.layout.block_outermost) {
      row_of_layers();
    } else {
      rows_of_blocks();
    }
  }

 private:
  void add(const char* key, std::uint64_t value, std::uint64_t least, const std::string& what,
           const char* hint) {
    problems_.add(path_ + "." + key, std::to_string(value),
                  "at least " + bytes_text(least) + ", " + what + ", in layout " +
                      std::string(shape_.layout.name),
                  hint);
  }

  std::string layer() const { return tensor_.layers[shape_.position]; }

  bool fits() {
    const std::uint64_t part = shape_.part_bytes();
    if (tensor_.block_stride < part) {
      problems_.add(
          path_ + ".block_stride", std::to_string(tensor_.block_stride),
          "at least the page of layer " + layer() + ", " + bytes_text(part),
          shape_.splits_heads() ? "of one head, since the layout puts heads outside" : "");
      return false;
    }
    const PageAxes& axes = shape_.axes;
    const std::uint64_t content = axes.heads * axes.positions * axes.content_bytes;
    if (shape_.splits_heads() && shape_.page != content) {
      problems_.add(path_ + ".layers[" + std::to_string(shape_.position) + "]",
                    layer() + " with a page of " + bytes_text(shape_.page),
                    "its unpadded page, " + bytes_text(content),
                    "layout " + std::string(shape_.layout.name) + " splits a page by heads");
      return false;
    }
    return true;
  }

  void kernel() {
    const std::uint64_t size = tensor_.kernel_block_size;
    if (size == 0 || size == shape_.axes.positions) return;
    const std::string value = std::to_string(size);
    const std::string key = path_ + ".kernel_block_size";
    if (shape_.axes.positions % size != 0) {
      problems_.add(key, value,
                    "a divisor of the " + std::to_string(shape_.axes.positions) +
                        " positions in a block of layer " + layer());
      return;
    }
    const PageAxes& axes = shape_.axes;
    if (shape_.page != axes.heads * axes.positions * axes.content_bytes) {
      problems_.add(key, value,
                    "the whole block, since the page of layer " + layer() + " is padded");
    } else if (shape_.splits_heads() && shape_.layout.block_outermost &&
               (layers_ > 1 || shape_.head_stride() != shape_.part_bytes())) {
      problems_.add(key, value,
                    "the whole block, since layout " + std::string(shape_.layout.name) +
                        " has other layers between its heads");
    }
  }

  // Inside a page heads are where the layout's name puts them; a stride that is given must agree.
  void heads() {
    if (!shape_.layout.head_inside_page || shape_.axes.heads < 2 || tensor_.head_stride == 0)
      return;
    const PageAxes& axes = shape_.axes;
    const std::uint64_t positions = axes.positions / shape_.kernel_blocks();
    const std::uint64_t stride =
        axes.content_bytes * (shape_.layout.heads_before_positions ? positions : 1);
    if (tensor_.head_stride == stride) return;
    problems_.add(
        path_ + ".head_stride", std::to_string(tensor_.head_stride),
        bytes_text(stride) + ", inside a page of layout " + std::string(shape_.layout.name),
        kOtherLayout);
  }

  // Every block of a layer, and of a head where those are outside, before the next one begins.
  void rows_of_blocks() {
    const std::uint64_t row = saturating_add(
        saturating_mul(shape_.num_blocks - 1, tensor_.block_stride), shape_.part_bytes());
    if (shape_.splits_heads() && shape_.head_stride() < row)
      add("head_stride", shape_.head_stride(), row, "all blocks of one head", kOtherLayout);
    const std::uint64_t span = saturating_add(
        saturating_mul(shape_.parts() - 1, shape_.splits_heads() ? shape_.head_stride() : 0), row);
    if (layers_ > 1 && tensor_.layer_stride < span)
      add("layer_stride", tensor_.layer_stride, span, "all blocks of one layer", kOtherLayout);
  }

  // Every layer of a block before the next block begins.
  void row_of_layers() {
    const std::uint64_t part = shape_.part_bytes();
    if (layers_ > 1 && tensor_.layer_stride < part)
      add("layer_stride", tensor_.layer_stride, part, "what one layer holds together",
          kOtherLayout);
    const std::uint64_t row = saturating_add(layer_span_, part);
    if (shape_.splits_heads() && shape_.head_stride() < row)
      add("head_stride", shape_.head_stride(), row, "all layers of one head", kOtherLayout);
    const std::uint64_t block = saturating_add(
        saturating_mul(shape_.parts() - 1, shape_.splits_heads() ? shape_.head_stride() : 0), row);
    if ((layers_ > 1 || shape_.splits_heads()) && tensor_.block_stride < block)
      add("block_stride", tensor_.block_stride, block, "all layers of one block", kOtherLayout);
  }

  const LayerShape& shape_;
  const CacheTensor& tensor_;
  std::uint64_t layers_;
  std::uint64_t layer_span_;
  const std::string& path_;
  ProblemList& problems_;
};

}  // namespace

std::string bytes_text(std::uint64_t bytes) {
  return bytes == kSaturated ? std::string("more than 2^64 bytes")
                             : std::to_string(bytes) + " bytes";
}

std::uint64_t LayerShape::part_bytes() const noexcept {
  return splits_heads() ? saturating_mul(axes.positions, axes.content_bytes) : page;
}

std::uint64_t LayerShape::head_stride() const noexcept {
  if (tensor->head_stride != 0) return tensor->head_stride;
  return layout.block_outermost
             ? saturating_mul(tensor->layers.size(),
                              tensor->layer_stride == 0 ? part_bytes() : tensor->layer_stride)
             : saturating_mul(num_blocks, tensor->block_stride);
}

std::uint64_t LayerShape::begin() const noexcept {
  return saturating_add(tensor->offset, saturating_mul(position, tensor->layer_stride));
}

std::uint64_t LayerShape::end() const noexcept {
  std::uint64_t at = saturating_add(begin(), saturating_mul(num_blocks - 1, tensor->block_stride));
  if (splits_heads()) at = saturating_add(at, saturating_mul(axes.heads - 1, head_stride()));
  return saturating_add(at, part_bytes());
}

std::uint64_t LayerShape::kernel_blocks() const noexcept {
  const std::uint64_t size = tensor->kernel_block_size;
  return size == 0 || size > axes.positions ? 1 : axes.positions / size;
}

void check_strides(const LayerShape& shape, std::uint64_t layers, std::uint64_t span,
                   const std::string& tensor_path, ProblemList& problems) {
  StrideCheck(shape, layers, span, tensor_path, problems).check();
}

std::vector<Run> parts_of(const LayerShape& shape) {
  std::vector<Run> parts;
  for (std::uint64_t head = 0; head < shape.parts(); ++head) {
    const std::uint64_t at = shape.begin() + (head == 0 ? 0 : head * shape.head_stride());
    parts.push_back({at, shape.part_bytes(), head});
  }
  return parts;
}

std::vector<Run> runs_of(const LayerShape& shape) {
  const std::uint64_t kernels = shape.kernel_blocks();
  // Where blocks are outermost, so are kernel blocks: their heads lie inside them.
  const bool inside = shape.layout.head_inside_page || shape.layout.block_outermost;
  if (kernels == 1 || shape.axes.heads == 1 || !shape.layout.heads_before_positions || !inside) {
    std::vector<Run> parts = parts_of(shape);
    if (!shape.splits_heads()) parts.front().length = shape.moved;
    return parts;
  }
  const std::uint64_t run = shape.axes.positions / kernels * shape.axes.content_bytes;
  std::vector<Run> runs;
  for (std::uint64_t head = 0; head < shape.axes.heads; ++head) {
    for (std::uint64_t kernel = 0; kernel < kernels; ++kernel) {
      runs.push_back({shape.begin() + (kernel * shape.axes.heads + head) * run, run, head});
    }
  }
  return runs;
}

}  // namespace kvprism::detail
