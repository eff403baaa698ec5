// Which files of Open MPI's parameters are read, and how they are parsed.
#include "mpi/open_mpi/mca_files.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

namespace dscomm::test {
namespace {

using Names = std::vector<std::string>;

// A temporary folder; unsets the variables that name other folders.
class McaFiles : public ::testing::Test {
 protected:
  McaFiles() {
    char folder[] = "/tmp/mca_files_test.XXXXXX";
    folder_ = ::mkdtemp(folder);
    for (const char* name : {"OPAL_SYSCONFDIR", "OPAL_PREFIX", "OMPI_MCA_mca_base_param_files",
                             "OMPI_MCA_mca_param_files"})
      ::unsetenv(name);
    ::setenv("HOME", folder_.c_str(), 1);
  }
  ~McaFiles() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& text) const {
    const std::filesystem::path path = folder_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
    return path;
  }

  std::filesystem::path folder_;
};

TEST_F(McaFiles, ParseReadsNamesAndValues) {
  const McaParameters expected{{"btl_tcp_if_exclude", "lo,docker0"},
                               {"mtl", "\"^ofi\" # too"},
                               {"pml", ""},
                               {"twice", "second"}};
  std::istringstream file(
      "# btl = self\n"
      " // btl = tcp\n"
      "  btl_tcp_if_exclude = lo,docker0 \t\r\n"
      "mtl=\"^ofi\" # too\n"
      "pml =\n"
      "no value\n= no name\n"
      "twice = first\n\n"
      "twice = second");
  EXPECT_EQ(parse_mca_file(file), expected);
  std::istringstream empty;
  EXPECT_EQ(parse_mca_file(empty), McaParameters());
}

TEST_F(McaFiles, UserFileComesBeforeAdministratorFile) {
  const std::string site = write("opt/etc/openmpi-mca-params.conf", "");
  EXPECT_EQ(mca_file_names(write("opt/lib/libmpi.so.40", "")),
            (Names{folder_ / "opt/etc/openmpi-mca-params-override.conf",
                   folder_ / ".openmpi/mca-params.conf", site}));
  // Without an administrator's file, the user's is read.
  EXPECT_EQ(mca_file_names(write("nothing/lib/libmpi.so.40", "")),
            (Names{folder_ / ".openmpi/mca-params.conf"}));
}

TEST_F(McaFiles, OpenMpiVariablesChangeFileNames) {
  const std::string library = write("opt/lib/libmpi.so.40", "");
  ::setenv("OPAL_PREFIX", "/elsewhere", 1);
  EXPECT_EQ(mca_file_names(library).back(), "/elsewhere/etc/openmpi-mca-params.conf");
  ::setenv("OPAL_SYSCONFDIR", "/settings", 1);
  EXPECT_EQ(mca_file_names(library).back(), "/settings/openmpi-mca-params.conf");
  ::setenv("OMPI_MCA_mca_base_param_files", "/one:/two,/three", 1);
  EXPECT_EQ(mca_file_names(library),
            (Names{"/settings/openmpi-mca-params-override.conf", "/one", "/two", "/three"}));
  ::setenv("OMPI_MCA_mca_base_param_files", "none", 1);
  EXPECT_EQ(mca_file_names(library), Names());
}

TEST_F(McaFiles, FilesNamedByVariableAreRead) {
  ::setenv("OMPI_MCA_mca_base_param_files",
           (write("first", "mtl = ^ofi\n") + ":" + write("second", "mtl = psm\npml = ob1\n") +
            ":/nowhere")
               .c_str(),
           1);
  const McaParameters found = parameters_of_mca_files();
  EXPECT_EQ(found.at("mtl"), "^ofi");
  EXPECT_EQ(found.at("pml"), "ob1");
}

}  // namespace
}  // namespace dscomm::test
