// A GPU in name only, for a torch built without CUDA: tensors that say they are on it can be sliced and differentiated.
// Nothing is allocated or launched; the scripts that load it (`one_gpu.py`) give it fake tensors, which have no memory.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static c10::Device gpu() {
    return c10::Device(c10::DeviceType::CUDA, 0);
  }
  static c10::Stream stream() {
    return c10::Stream(c10::Stream::DEFAULT, gpu());
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return gpu();
  }
  c10::Device getDevice() const override {
    return gpu();
  }
  c10::Stream getStream(c10::Device) const noexcept override {
    return stream();
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return stream();
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return stream();
  }
  // Backward on a GPU waits for events between streams, of which there is one here.
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
};

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}

// torch looks this class up by its name.
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasCUDA() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
};

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}
