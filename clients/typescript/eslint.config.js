import { defineConfig, globalIgnores } from "eslint/config";
import tseslint from "typescript-eslint";

export default defineConfig(
  globalIgnores(["**/dist/", "src/gen/"]),
  {
    files: ["**/*.ts"],
    extends: [tseslint.configs.strictTypeChecked],
    languageOptions: { parserOptions: { projectService: true } },
    rules: {
      // `() => call.cancel()` is as clear as the same with braces.
      "@typescript-eslint/no-confusing-void-expression": ["error", { ignoreArrowShorthand: true }],
      // Enums of the contract are open: the wire brings their numbers, and later ones too.
      "@typescript-eslint/no-unsafe-enum-assignment": "off",
      "max-len": ["error", { code: 100 }],
      "max-lines-per-function": ["error", 60],
    },
  },
);
