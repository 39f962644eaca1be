#include "converters.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "gil_free.h"
#include "kvprism/base/error.h"

namespace kvprism::bindings {
namespace {

constexpr double kLongestSeconds = 1e9;

[[noreturn]] void refuse(std::string path, std::string value, std::string expected) {
  fail(ErrorCode::kInvalidArgument, "argument",
       {std::move(path), std::move(value), std::move(expected), {}});
}

std::string shown(nb::handle object) {
  std::string text = nb::repr(object).c_str();
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

std::string at(const std::string& path, std::size_t index) {
  return path + "[" + std::to_string(index) + "]";
}

bool is_plain_bytes(nb::handle object) noexcept {
  return PyBytes_Check(object.ptr()) || PyByteArray_Check(object.ptr()) ||
         PyMemoryView_Check(object.ptr());
}

// Items of a list, a tuple, or anything else that can be iterated.
class Sequence {
 public:
  Sequence(nb::handle object, const std::string& path) {
    const bool direct = PyList_Check(object.ptr()) || PyTuple_Check(object.ptr());
    if (!direct && (PyUnicode_Check(object.ptr()) || !PySequence_Check(object.ptr()))) {
      refuse(path, shown(object), "a sequence");
    }
    items_ = direct ? nb::borrow(object) : nb::steal(PySequence_List(object.ptr()));
    if (!items_.is_valid()) throw nb::python_error();
    list_ = PyList_Check(items_.ptr());
    size_ = list_ ? PyList_Size(items_.ptr()) : PyTuple_Size(items_.ptr());
  }
  std::size_t size() const noexcept { return static_cast<std::size_t>(size_); }
  // Borrowed. A list that shrinks meanwhile ends as an error.
  nb::handle operator[](std::size_t index) const {
    const auto i = static_cast<Py_ssize_t>(index);
    PyObject* const item =
        list_ ? PyList_GetItem(items_.ptr(), i) : PyTuple_GetItem(items_.ptr(), i);
    if (item == nullptr) throw nb::python_error();
    return item;
  }

 private:
  nb::object items_;
  bool list_ = false;
  Py_ssize_t size_ = 0;
};

template <class Number>
Number narrow(long long value, const std::string& path, std::size_t index, const char* expected) {
  if (value < static_cast<long long>(std::numeric_limits<Number>::min()) ||
      value > static_cast<long long>(std::numeric_limits<Number>::max())) {
    refuse(at(path, index), std::to_string(value), expected);
  }
  return static_cast<Number>(value);
}

template <class Source, class Number, class Out>
void copy_items(const BufferView& view, const std::string& path, const char* expected,
                const RowRange& range, Out* out) {
  if constexpr (sizeof(Source) == sizeof(Out) &&
                std::is_signed_v<Source> == std::is_signed_v<Number>) {
    if (view.contiguous()) {
      if (range.first < range.end) {
        std::memcpy(out, view.data() + range.first * sizeof(Out),
                    (range.end - range.first) * sizeof(Out));
      }
      return;
    }
  }
  for (std::size_t i = range.first; i < range.end; ++i) {
    Source value;
    std::memcpy(&value, view.data() + static_cast<std::ptrdiff_t>(i) * view.stride(), sizeof value);
    if constexpr (std::is_same_v<Source, std::uint64_t>) {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<long long>::max())) {
        refuse(at(path, i), std::to_string(value), expected);
      }
    }
    *out++ = Out{narrow<Number>(static_cast<long long>(value), path, i, expected)};
  }
}

// The integers of a list, a tuple, an array of any integer type, or bytes that hold native 32-bit
// integers. Number is the underlying type of Out.
template <class Number, class Out>
class Integers {
 public:
  Integers(nb::handle row, const std::string& path, const char* expected)
      : path_(path), expected_(expected) {
    if (PyList_Check(row.ptr()) || PyTuple_Check(row.ptr()) || !BufferView::offered_by(row)) {
      items_.emplace(row, path);
      size_ = items_->size();
      return;
    }
    view_.emplace(row, path);
    if (view_->dimensions() != 1) refuse(path, view_->describe(), "one dimension");
    packed_ = is_plain_bytes(row) && view_->item_bytes() == 1;
    if (packed_ && (view_->bytes() % sizeof(Out) != 0 || !view_->contiguous())) {
      refuse(path, view_->describe(), "32-bit integers: a multiple of 4 bytes");
    }
    size_ = packed_ ? view_->bytes() / sizeof(Out) : view_->shape(0);
  }

  std::size_t size() const noexcept { return size_; }

  // Writes range.end - range.first integers; the range must lie inside size().
  void copy(const RowRange& range, Out* out) const {
    if (items_) {
      for (std::size_t i = range.first; i < range.end; ++i) {
        const nb::handle item = (*items_)[i];
        const long long value = PyLong_AsLongLong(item.ptr());
        if (value == -1 && PyErr_Occurred() != nullptr) {
          PyErr_Clear();
          refuse(at(path_, i), shown(item), expected_);
        }
        *out++ = Out{narrow<Number>(value, path_, i, expected_)};
      }
      return;
    }
    if (packed_) {
      if (range.first < range.end) {
        std::memcpy(out, view_->data() + range.first * sizeof(Out),
                    (range.end - range.first) * sizeof(Out));
      }
      return;
    }
    const char kind = view_->kind();
    const std::size_t size = view_->item_bytes();
    if (kind == 'i' && size == 4) return copy_as<std::int32_t>(range, out);
    if (kind == 'i' && size == 8) return copy_as<std::int64_t>(range, out);
    if (kind == 'u' && size == 4) return copy_as<std::uint32_t>(range, out);
    if (kind == 'u' && size == 8) return copy_as<std::uint64_t>(range, out);
    if (kind == 'i' && size == 2) return copy_as<std::int16_t>(range, out);
    if (kind == 'u' && size == 2) return copy_as<std::uint16_t>(range, out);
    refuse(path_, view_->describe(), "integers of 16, 32 or 64 bits");
  }

 private:
  template <class Source>
  void copy_as(const RowRange& range, Out* out) const {
    copy_items<Source, Number>(*view_, path_, expected_, range, out);
  }

  const std::string& path_;
  const char* expected_;
  std::optional<Sequence> items_;
  std::optional<BufferView> view_;
  bool packed_ = false;
  std::size_t size_ = 0;
};

constexpr const char* kBlockId = "a block id of 32 bits";

template <class Number, class Out>
void append_integers(nb::handle row, const std::string& path, const char* expected,
                     std::vector<Out>& out) {
  const Integers<Number, Out> integers(row, path, expected);
  const std::size_t start = out.size();
  out.resize(start + integers.size());
  integers.copy({0, integers.size()}, out.data() + start);
}

}  // namespace

BufferView::BufferView(nb::handle object, const std::string& path) {
  if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    refuse(path, shown(object), "bytes or a buffer");
  }
}

char BufferView::kind() const noexcept {
  const char* format = view_.format == nullptr ? "B" : view_.format;
  // A byte order of the machine's own, or one where it makes no difference.
  if (*format == '@' || *format == '=' || *format == '<' || *format == '|') ++format;
  if (*format >= '0' && *format <= '9') return 'S';
  if (format[0] != '\0' && format[1] != '\0') return 'x';
  switch (*format) {
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q':
    case 'n':
      return 'i';
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
    case 'N':
      return 'u';
    case 's':
      return 'S';
    default:
      return 'x';
  }
}

bool BufferView::contiguous() const noexcept { return PyBuffer_IsContiguous(&view_, 'C') != 0; }

std::string BufferView::describe() const {
  std::string text = "buffer of shape (";
  for (int i = 0; i < view_.ndim; ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(view_.shape[i]);
  return text + "), format '" + (view_.format == nullptr ? "B" : view_.format) + "'";
}

EncodedBytes::EncodedBytes(nb::handle object, const std::string& path) : view_(object, path) {
  if (!view_.contiguous()) refuse(path, view_.describe(), "contiguous bytes");
  const std::size_t size = view_.bytes();
  if (reinterpret_cast<std::uintptr_t>(view_.data()) % alignof(std::uint64_t) == 0) {
    bytes_ = {view_.data(), size};
    return;
  }
  aligned_.resize((size + 7) / 8);
  if (size != 0) std::memcpy(aligned_.data(), view_.data(), size);
  bytes_ = std::as_bytes(std::span(aligned_)).first(size);
}

void append_tokens(nb::handle tokens, const std::string& path, std::vector<std::uint32_t>& out) {
  append_integers<std::uint32_t>(tokens, path, "a token id from 0 to 4294967295", out);
}

template <class RangeOf>
BlockRows BlockRowsReader::read_ranges(nb::handle rows, const RangeOf& range_of) {
  ends_.clear();
  rows_.clear();
  const Sequence groups(rows, "rows");
  std::size_t start = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::string path = at("rows", g);
    const Integers<std::int32_t, BlockId> ids(groups[g], path, kBlockId);
    RowRange range = range_of(g, ids.size());
    range.end = std::min(range.end, ids.size());
    range.first = std::min(range.first, range.end);
    const std::size_t end = start + ids.size();
    if (ids_.size() < end) ids_.resize(end);
    ids.copy(range, ids_.data() + start + range.first);
    ids_read_ += range.end - range.first;
    ends_.push_back(end);
    start = end;
  }
  std::size_t first = 0;
  for (const std::size_t end : ends_) {
    rows_.push_back(std::span<const BlockId>(ids_).subspan(first, end - first));
    first = end;
  }
  return BlockRows(rows_);
}

BlockRows BlockRowsReader::read(nb::handle rows) {
  return read_ranges(rows, [](std::size_t, std::size_t size) { return RowRange{0, size}; });
}

BlockRows BlockRowsReader::read(nb::handle rows, std::span<const RowRange> ranges) {
  return read_ranges(
      rows, [&](std::size_t g, std::size_t) { return g < ranges.size() ? ranges[g] : RowRange{}; });
}

namespace {

// One known hash is read all the same: the scheduler sees by it that the request is still the same.
std::size_t first_read(std::uint32_t known, std::size_t count) {
  const std::size_t skipped = std::min<std::size_t>(known, count);
  return skipped == 0 ? 0 : skipped - 1;
}

}  // namespace

HashList HashListReader::read(nb::handle hashes, std::uint32_t known, std::uint32_t flat_width) {
  bytes_.clear();
  if (hashes.is_none()) return {};
  const bool sequence =
      PyList_Check(hashes.ptr()) || PyTuple_Check(hashes.ptr()) || !BufferView::offered_by(hashes);
  return sequence ? read_sequence(hashes, known) : read_buffer(hashes, known, flat_width);
}

HashList HashListReader::read_sequence(nb::handle hashes, std::uint32_t known) {
  const Sequence items(hashes, "hashes");
  const std::size_t first = first_read(known, items.size());
  std::size_t width = 0;
  for (std::size_t i = first; i < items.size(); ++i) {
    const nb::handle item = items[i];
    char* data = nullptr;
    Py_ssize_t length = 0;
    if (!PyBytes_Check(item.ptr())) refuse(at("hashes", i), shown(item), "bytes");
    if (PyBytes_AsStringAndSize(item.ptr(), &data, &length) != 0) throw nb::python_error();
    if (width == 0) {
      width = static_cast<std::size_t>(length);
      if (width < kMinHashWidth || width > kMaxHashWidth) {
        refuse(at("hashes", i), std::to_string(length) + " bytes", "16 to 64 bytes");
      }
      bytes_.reserve((items.size() - first) * width);
    }
    if (static_cast<std::size_t>(length) != width) {
      refuse(at("hashes", i), std::to_string(length) + " bytes",
             std::to_string(width) + " bytes as the others");
    }
    // Of the vector's own type: a range of char would be copied byte by byte.
    const auto* const hash = reinterpret_cast<const std::uint8_t*>(data);
    bytes_.insert(bytes_.end(), hash, hash + length);
  }
  return {bytes_.data(), static_cast<std::uint32_t>(items.size() - first),
          static_cast<std::uint32_t>(width), static_cast<std::uint32_t>(first)};
}

HashList HashListReader::read_buffer(nb::handle hashes, std::uint32_t known,
                                     std::uint32_t flat_width) {
  const BufferView view(hashes, "hashes");
  if (!view.contiguous()) refuse("hashes", view.describe(), "a contiguous array");
  std::size_t width = 0;
  if (view.dimensions() == 2 && view.item_bytes() == 1) {
    width = view.shape(1);
  } else if (view.dimensions() == 1) {
    width = view.item_bytes() == 1 ? flat_width : view.item_bytes();
  }
  if (width < kMinHashWidth || width > kMaxHashWidth || view.bytes() % width != 0) {
    refuse("hashes", view.describe(),
           "shape (count, width), items of 16 to 64 bytes, or flat bytes of " +
               std::to_string(flat_width) + " a hash");
  }
  const std::size_t count = view.bytes() / width;
  const std::size_t first = first_read(known, count);
  const auto* const data = reinterpret_cast<const std::uint8_t*>(view.data());
  {
    // The view keeps the memory; many hashes take longer to copy than the GIL to change hands.
    std::optional<GilFree> released;
    if (count - first > 2048) released.emplace();
    bytes_.assign(data + first * width, data + count * width);
  }
  return {bytes_.data(), static_cast<std::uint32_t>(count - first),
          static_cast<std::uint32_t>(width), static_cast<std::uint32_t>(first)};
}

Duration to_duration(double seconds, const char* path) {
  ProblemList problems;
  const Duration duration = to_duration(seconds, path, problems);
  problems.throw_if_any(ErrorCode::kInvalidArgument, "argument");
  return duration;
}

Duration to_duration(double seconds, const char* path, ProblemList& problems) {
  if (!(seconds >= 0)) {
    problems.add(path, std::to_string(seconds), "0 or more seconds");
    seconds = 1;
  }
  return Duration{static_cast<std::int64_t>(std::min(seconds, kLongestSeconds) * 1e9)};
}

}  // namespace kvprism::bindings
