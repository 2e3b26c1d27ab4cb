// An allocator for the CPU that counts the bytes alive and fails where it is told to. `limited.py` compiles and calls.
//
// It allocates by the allocator that it replaces, so a profiler sees what it always sees. A table knows the allocator
// and the size of each block, so it is freed rightly whichever allocator is in use by then. oneDNN frees by the address
// alone and by the allocator of that moment: what was allocated before comes here, and what is allocated here may be
// freed elsewhere, which is noticed when its address is used again. Allocators are never deleted: a storage keeps a
// pointer to the one that it came from, for its next resize.
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace {

class Limited;

struct Block {
  Limited* owner;
  int64_t size;
};

// The lock of all that follows. Both outlive every tensor.
std::mutex& mutex = *new std::mutex();
auto& blocks = *new std::unordered_map<void*, Block>();

class Limited final : public c10::Allocator {
 public:
  // A limit below 0 is none. `failing` counts down to the allocation that fails.
  int64_t live = 0, lap = 0, count = 0, limit = -1, failing = 0, forever = 0;
  c10::Allocator* const former = c10::GetCPUAllocator();
  Limited* const outer = dynamic_cast<Limited*>(former);
  c10::Allocator* const source = outer ? outer->source : former;

  c10::DataPtr allocate(size_t nbytes) override {
    const auto size = static_cast<int64_t>(nbytes);
    if (size > 0) {
      mutex.lock();
      const auto complaint = take(size);
      mutex.unlock();
      TORCH_CHECK_WITH(
          OutOfMemoryError, complaint.empty(), "CPU out of memory: ", size, " bytes were wanted", complaint);
    }
    void* data = nullptr;
    try {
      data = source->raw_allocate(nbytes);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex);
      give(size);
      throw;
    }
    if (size > 0) {
      std::lock_guard<std::mutex> lock(mutex);
      forget(data);
      blocks[data] = {this, size};
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }

 private:
  // Counts a block here and in the outer ones, or says why not and counts it in none.
  std::string take(int64_t size) {
    const bool fails = failing > 0 && --failing == 0;
    failing += fails ? forever : 0;
    if (fails) {
      return ", and a test asked that it fail.";
    }
    if (limit >= 0 && live + size > limit) {
      return c10::str(", ", live, " are alive, and the limit of a test is ", limit, ".");
    }
    auto complaint = outer ? outer->take(size) : "";
    if (complaint.empty()) {
      ++count;
      live += size;
      lap = std::max(lap, live);
    }
    return complaint;
  }

  void give(int64_t size) {
    for (auto* each = this; each; each = each->outer) {
      each->live -= size;
    }
  }

  // Takes a block out of the books; returns its allocator's source, or null where it is in none.
  static c10::Allocator* forget(void* data) {
    const auto found = blocks.find(data);
    if (found == blocks.end()) {
      return nullptr;
    }
    const auto [owner, size] = found->second;
    blocks.erase(found);
    owner->give(size);
    return owner->source;
  }

  static void release(void* data) {
    mutex.lock();
    auto* source = forget(data);
    mutex.unlock();
    (source ? source : c10::GetDefaultCPUAllocator())->raw_deallocate(data);
  }
};

}  // namespace

extern "C" {

void* limited_begin() {
  auto* made = new Limited();
  c10::SetCPUAllocator(made);
  return made;
}

// Whether it was the one in use.
bool limited_end(void* handle) {
  auto* ended = static_cast<Limited*>(handle);
  if (c10::GetCPUAllocator() != ended) {
    return false;
  }
  c10::SetCPUAllocator(ended->former);
  return true;
}

// Reads live, lap, count and limit.
void limited_read(void* handle, int64_t* to) {
  std::lock_guard<std::mutex> lock(mutex);
  auto* of = static_cast<Limited*>(handle);
  to[0] = of->live, to[1] = of->lap, to[2] = of->count, to[3] = of->limit;
}

void limited_reset_lap(void* handle) {
  std::lock_guard<std::mutex> lock(mutex);
  auto* of = static_cast<Limited*>(handle);
  of->lap = of->live;
}

void limited_limit(void* handle, int64_t limit) {
  std::lock_guard<std::mutex> lock(mutex);
  static_cast<Limited*>(handle)->limit = limit;
}

void limited_fail(void* handle, int64_t at, bool forever) {
  std::lock_guard<std::mutex> lock(mutex);
  auto* of = static_cast<Limited*>(handle);
  of->failing = at, of->forever = forever;
}
}
