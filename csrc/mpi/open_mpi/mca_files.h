// The files in which an administrator or a user sets parameters of Open MPI (MCA parameters). What
// stands in the environment has precedence over them, so a default that is put there must not
// contradict them.
//
// Source: Open MPI 4.1, opal/mca/base/mca_base_var.c (which files are read, and in which order).
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace dscomm {

// By name, without "OMPI_MCA_".
using McaParameters = std::map<std::string, std::string>;

// The parameters that a file's text sets, in lines "name = value". A value ends with its line, and
// may contain '#'; a line that has '#' or "//" before '=' is a comment. The last line of a name
// counts. Lines "-mca name value", which Open MPI reads as well, are left out.
McaParameters parse_mca_file(std::string_view text);

// The files that Open MPI reads if they exist, the one with the highest precedence first.
// `library` is the path of libmpi: a configuration folder lies above its folder, or, for one
// below /usr, in /etc.
std::vector<std::string> mca_file_names(const std::string& library);

// What the files of this process's libmpi set. Files that cannot be read are left out, as Open MPI
// does.
McaParameters parameters_of_mca_files();

}  // namespace dscomm
