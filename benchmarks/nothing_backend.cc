// A c10d backend whose all-reduce does nothing: a call takes only torch's own time.
//
// For benchmarks/call_cost.py, which compiles it.
#include <torch/extension.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace {

class NothingBackend : public c10d::Backend {
 public:
  NothingBackend(int rank, int size) : c10d::Backend(rank, size) {}

  const std::string getBackendName() const override { return "nothing"; }

  // Returns null, as torch allows for a call that has ended. No asynchronous call is made here.
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&,
                                           const c10d::AllreduceOptions& options) override {
    TORCH_CHECK(!options.asyncOp, "the backend nothing has no Work to give");
    return {};
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  pybind11::class_<NothingBackend, c10d::Backend, c10::intrusive_ptr<NothingBackend>>(
      module, "NothingBackend")
      .def(pybind11::init(
               [](int rank, int size) { return c10::make_intrusive<NothingBackend>(rank, size); }),
           pybind11::arg("rank"), pybind11::arg("size"));
}
